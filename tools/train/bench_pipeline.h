// What a pipeline is made of, measured part by part: how long each stage's
// passes take on one device, and each message between two. `tapeline schedule
// --stage_cost` times a schedule with the first; a run's step can be compared
// with what that says.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dist/launch.h"
#include "runtime/json.h"
#include "tools/config/config.h"

namespace tapeline {

// Milliseconds of a micro-batch, medians over steps. B is measured apart: one
// sweep is not two.
struct StagePasses {
  double forward = 0, input = 0, weight = 0, backward = 0;
};

struct StagesReport {
  std::string device, dtype, schedule, layout;
  int64_t micro_batches = 0, seq = 0;
  std::vector<StagePasses> stages;
};

// The stages that a pipeline of `ranks` has under the config, all on the
// current device, over the micro-batches that training begins with, one at a
// time. `warmup` steps, then `repeats`.
struct StagesOptions {
  int ranks = 1;
  int64_t warmup = 1, repeats = 3;
  // As this process finds them.
  std::string model_path, data, schedule_file;
};
absl::StatusOr<StagesReport> bench_stages(const Config& config,
                                          const StagesOptions& options);

struct MessageTime {
  std::string what;  // "output 0", "gradient 1"; empty: one of a plain size
  int from = 0, to = 0;
  int64_t bytes = 0;
  double ms = 0;  // one way
};
struct MessagesReport {
  std::string device, schedule, layout;
  int64_t ranks = 0, repeats = 0;
  std::vector<MessageTime> sizes;     // powers of two between ranks 0 and 1
  std::vector<MessageTime> messages;  // of a micro-batch
  double latency = 0;                 // ms of a message, their mean
};

// Entered by all processes of a job, each on its current device: `repeats`
// round trips of each message. The report is rank 0's.
absl::StatusOr<MessagesReport> bench_messages(const Config& config,
                                              const Launched& launch,
                                              const StagesOptions& options);

Json to_json(const StagesReport& report);
std::string to_text(const StagesReport& report);
Json to_json(const MessagesReport& report);
std::string to_text(const MessagesReport& report);

}  // namespace tapeline
