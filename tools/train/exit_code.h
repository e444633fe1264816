// How a process ends, carried inside a status.
//
// The codes are part of the interface. A status without one is bad input: most
// errors are found before any work.
#pragma once

#include "absl/status/status.h"

namespace tapeline {

enum ExitCode : int {
  kExitDone = 0,
  kExitDiffers = 1,   // a comparison failed
  kExitBadInput = 2,  // config, data or file
  kExitUsage = 64,
  kExitOutOfMemory = 70,
  kExitNotFinite = 71,      // more skipped steps than the budget
  kExitCommunication = 72,  // another process failed, or was not heard of
  kExitDisk = 74,
  kExitSnapshot = 75,  // corrupt, and none usable
  kExitInterrupted = 130,
  kExitTerminated = 143,
};

// The same error, which ends the process with `code`. OK stays OK.
absl::Status ending(ExitCode code, absl::Status status);
ExitCode exit_code(const absl::Status& status);

}  // namespace tapeline
