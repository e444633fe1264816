// Runs a schedule, valid or not, action by action on numbers instead of
// tensors.
//
// Ranks take turns in a random order. Each receives what an action needs, one
// message after the other, runs it, and sends. Messages lie in one FIFO queue
// for each direction of a stage edge, and a receiver takes what comes, as
// hardware does: a message in the wrong place gives wrong numbers. It shares no
// code with the validator beyond the schedule itself: it is what the validator
// is judged by.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dist/pipeline/schedule.h"

namespace tapeline {

enum class Outcome {
  kRight,  // ended, with the gradients of a loop over the micro-batches
  kWrong,  // gradients are missing, doubled or other, or values are left over
  kHung,   // a rank waits and nothing can come
};
struct RunResult {
  Outcome outcome = Outcome::kRight;
  std::string what;
  // By rank: most at once of what passes left for later ones, each worth as
  // RunOptions says. Counted from what is there, after every pass.
  std::vector<double> most;
};

struct RunOptions {
  OvRelease ov_release = OvRelease::kEnd;
  // Messages that a queue holds; 0: sender and receiver meet; nothing: any.
  std::optional<size_t> capacity;
  uint64_t seed = 1;
  // What F leaves until I or B, and I until W.
  double forward_weight = 1, stash_weight = 1;
};
RunResult interpret(const Schedule& schedule, const RunOptions& options = {});

}  // namespace tapeline
