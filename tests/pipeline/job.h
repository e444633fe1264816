// A job of processes, started with torchrun's variables and no launcher.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace tapeline {

struct Ended {
  int code = -1;  // -1: by a signal, or it had to be killed
  double seconds = 0;
  std::string err, out;  // out: what it wrote to its file
};

// A new folder for a test's files.
std::string new_folder();

// `command(rank, out)` is what the process of a rank runs, out the file that it
// may write. Kills who still runs once all but `waits_not_for` have ended, or
// after four minutes.
std::vector<Ended> run_job(int ranks,
                           const std::function<std::vector<std::string>(
                               int rank, const std::string& out)>& command,
                           int waits_not_for = -1);

}  // namespace tapeline
