// The record of a step: a line of metrics.jsonl and a line for people.
//
// Losses are as they enter the total: each weighted by its coefficient, so that
// loss = lm + mtp + balance + z + indexer, up to rounding. What a run does not
// have is 0 or null. Key order is fixed; docs list the keys.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/json.h"

namespace tapeline {

struct StepRecord {
  int64_t step = 0;
  double time_unix = 0;
  double loss = 0, lm_loss = 0, mtp_loss = 0, balance_loss = 0, z_loss = 0,
         indexer_loss = 0;
  double lr = 0, grad_norm = 0;
  int64_t tokens = 0;  // consumed since the run began
  double tokens_per_s = 0, step_ms = 0;
  int64_t pool_peak_bytes = 0, rss_peak_bytes = 0;
  int64_t pinned_bytes = 0;       // host memory for copies
  int64_t offload_bytes = 0;      // copied to the host in this step
  double offload_exposed_ms = 0;  // of the step, spent in copies
  int64_t replays = 0;            // of checkpointed layers in this step
  int64_t skipped = 0;            // steps not applied since the run began
  // Idle part of all pipeline ranks' time: as it was, and as a simulation has
  // it in which each pass takes what it took on average. Absent: no pipeline.
  std::optional<double> bubble_measured, bubble_simulated;
  // Of the rank that took longest, from its step's begin to the end of its last
  // pass; of a rank on average, idle while a message that it needed was under
  // way. Absent: no pipeline, and where the host moves messages.
  std::optional<double> pipeline_ms, messages_exposed_ms;
  std::vector<int64_t> rank_peak_bytes;  // pool_peak_bytes of each rank
  std::string grad_hash, param_hash;     // empty: not computed at this step
};

struct EvalRecord {
  int64_t step = 0;
  double val_loss = 0;  // nats per token
  double val_bits_per_byte = 0;
  int64_t val_bytes = 0;
};

Json to_json(const StepRecord& record);
Json to_json(const EvalRecord& record);

// "step 120/2000 | loss 3.4127 | ...", columns aligned from line to line.
std::string step_line(const StepRecord& record, int64_t total_steps,
                      double seconds_left);

// Bytes of memory this process had resident at most (VmHWM); 0: unknown.
int64_t peak_resident_bytes();

// What stays of a metrics file when its run goes on from `step`.
struct MetricsCut {
  std::string kept;        // the file's text from now on
  bool cuts = false;       // it differs from what is there
  bool evaluated = false;  // an evaluation of `step` is in it
};

// Without the lines of later steps, and without last lines that are no records,
// which a crash leaves; absent is fine. Changes nothing. DataLoss: a line that
// is no record has records behind it.
absl::StatusOr<MetricsCut> read_metrics(const std::string& path, int64_t step);

}  // namespace tapeline
