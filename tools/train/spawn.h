// Several processes of this program on this host, as --nproc starts them.
//
// Each has the variables that torchrun would give it. What they print comes out
// line by line behind the number of the rank, "1 | step ...". When one fails,
// the others have `grace` seconds to end by themselves, which they do when they
// miss it, and are then killed; one that is stopped cannot, and is killed at
// once. SIGINT and SIGTERM are passed on. No child outlives the caller.
#pragma once

#include <string>
#include <vector>

namespace tapeline {

// Runs this program with the words `command`, its own name first, `processes`
// times. `first_alone`: standard output is that of rank 0 as it is, for who
// reads it by program; what the others print there goes to standard error.
// Returns code_of_job() of all that failed, or 0.
int run_processes(const std::vector<std::string>& command, int processes,
                  double grace_seconds = 15, bool first_alone = false);
// The job's exit code when one more process has ended with `code`, which is not
// 0 and 128 + number for a signal: that of the first, except that a process
// which missed another one can be seen to end before the one that it missed,
// whose own code is the cause. Who was killed from here caused nothing.
int code_of_job(int so_far, int code, bool killed_by_us);
// Whether the process that started this one did it so.
bool was_spawned();

}  // namespace tapeline
