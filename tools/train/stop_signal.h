// SIGINT and SIGTERM as a request: finish the step, save, leave.
//
// The first signal is only noted; the second ends the process at once with
// status 128 + its number. Process-wide; install once.
#pragma once

namespace tapeline {

void install_stop_signals();
// The first signal's number, or 0.
int stop_signal();
}  // namespace tapeline
