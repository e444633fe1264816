// When each action of a schedule runs, given what passes and messages cost.
//
// Every rank runs its actions in order, one at a time, each as soon as what it
// needs has arrived. A message arrives `latency` after its sender's action
// ended and occupies nobody; within a rank values are there at once. Queues
// have no bound. Times are in the unit of the costs.
#pragma once

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "dist/pipeline/schedule.h"

namespace tapeline {

// Of one stage. The I or B of a recomputed F costs F more.
struct StageCosts {
  double forward = 1, input = 1, weight = 1;
  std::optional<double> backward;    // I + W
  std::optional<double> overlapped;  // OV with F of this stage; F + B

  double whole_backward() const { return backward.value_or(input + weight); }
};

struct Costs {
  std::vector<StageCosts> stages = {StageCosts{}};  // one for all, or one each
  double latency = 0;
  // With kEarly the halves of OV take their shares of its cost one after the
  // other, each with its own inputs and results.
  OvRelease ov_release = OvRelease::kEnd;
};

struct Span {
  double begin = 0, end = 0;
};

// A message from its arrival at a rank to the action that uses it.
struct Waiting {
  Value value;
  int micro_batch = 0;
  Span span;
};

struct Simulation {
  double makespan = 0;
  // By rank: time in actions, the rest of the makespan, and the part of it
  // between the rank's first action and its last.
  std::vector<double> busy, idle, idle_inside;
  double bubble = 0;  // of all ranks' time, the part that is idle
  // By rank: most messages at once that have arrived and wait for their action.
  // So many receive buffers, shared by all channels of the rank, never delay
  // it.
  std::vector<int> slots;
  std::vector<std::vector<Waiting>> waiting;  // by rank, in order of use
  std::vector<std::vector<Span>> actions;     // by rank and action
};

// InvalidArgument, as the validator has it, if the schedule cannot run.
absl::StatusOr<Simulation> simulate(const Schedule& schedule,
                                    const Costs& costs);

}  // namespace tapeline
