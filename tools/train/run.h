// A training run: config to model to steps, with its folder (run_folder.h).
//
// Everything that can be wrong with config, data and model file is found before
// the run's folder is touched. A run that is stopped by SIGINT or SIGTERM ends
// its step, saves and says how to go on; a second signal ends it at once.
// Continuing from a snapshot repeats the bits of an uninterrupted run; metrics
// of steps after the snapshot are cut and written again.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tools/config/config.h"

namespace tapeline {

struct RunRequest {
  // Paths in it are relative to `base`.
  Config config;
  std::string base;
  bool resume = false;
  std::string snapshot;  // with resume: this one and no other; else the newest
  std::vector<std::string> command_line;
};

// The status carries the exit code (exit_code.h): OK, or why the run ended.
// With kExitInterrupted and kExitTerminated its message says how to go on.
absl::Status run_training(const RunRequest& request);

}  // namespace tapeline
