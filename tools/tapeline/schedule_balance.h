// What the parts of a model take, as `tapeline bench --stages --json` measured
// it, and the cut of them into a schedule's stages that a simulation has
// fastest.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dist/pipeline/layout.h"
#include "dist/pipeline/schedule.h"
#include "dist/pipeline/simulator.h"

namespace tapeline {

// Times of the longest schedule stay finite.
inline constexpr double kMostCost = 1e15;

// {"stages": [{"F": 1, "I": 1, "W": 1, "B": 2}, ...]}; B may be absent.
absl::StatusOr<std::vector<StageCosts>> read_stage_costs(
    const std::string& path);

// The stages of such a file, each of which stays whole.
struct MeasuredParts {
  Layout layout;
  std::vector<StageCosts> costs;
};
absl::StatusOr<MeasuredParts> read_parts(const std::string& path);

struct TimedLayout {
  Layout layout;
  std::vector<StageCosts> costs;  // by stage
  double busiest = 0;  // a micro-batch's time on the rank that has most
  Simulation simulation;
};

struct Balance {
  TimedLayout best;
  std::optional<TimedLayout> even;  // nothing if it would cut a part
  // The least time of a busiest rank that a search found, and whether there can
  // be no less.
  double least = 0;
  bool proven = false;
};

// Of the even cut and of the best ones by load (dist/pipeline/balance.h) the
// one that takes least time; of several the one with the least busiest rank.
absl::StatusOr<Balance> balance(const MeasuredParts& parts,
                                const Schedule& schedule, double latency,
                                OvRelease ov_release);

}  // namespace tapeline
