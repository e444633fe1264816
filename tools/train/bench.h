// What a forward and backward pass of a model costs: time and peak memory with
// weights, fp32 gradient sums and activations, and nothing of an optimizer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/cuda_monitor.h"
#include "runtime/json.h"
#include "tools/config/config.h"

namespace tapeline {

struct BenchOptions {
  int64_t batch = 1, seq = 0;  // sequences, tokens of each
  int64_t warmup = 3, repeats = 5;
  bool trace = false;      // one more pass, watched
  bool alternate = false;  // a pass without offload behind each timed one
};

struct BenchReport {
  std::string device, dtype;
  int64_t batch = 0, seq = 0;
  double ms = 0;                       // median
  std::vector<double> ms_all;          // in order
  std::vector<double> ms_without_all;  // of the passes without offload
  double tokens_per_s = 0;             // at the median
  int64_t params = 0;
  double loss = 0;  // of the last pass, over random tokens
  // Peak over the timed passes of bytes in use; what of it were weights and
  // gradient sums; what the pool held of the device's memory.
  int64_t peak_bytes = 0, parameter_bytes = 0, gradient_bytes = 0,
          reserved_bytes = 0;
  std::optional<CudaReport> traced;
};

// Runs on the current device, with random weights and tokens. The config has
// been checked (check_settings); its recomputation, offload and auxiliary
// losses count. `model_path` as model_config() wants it: only its config.json
// is read.
absl::StatusOr<BenchReport> bench_forward_backward(
    const Config& config, const std::string& model_path,
    const BenchOptions& options);

Json to_json(const BenchReport& report);
std::string to_text(const BenchReport& report);

}  // namespace tapeline
