// Proves that a schedule can run, or says which action cannot.
//
//   complete    every stage has, for every micro-batch, one F and one B or one
//               I and one W, on the rank of its placement, and nothing else
//   channel     every channel delivers messages in the order in which its
//               receiver takes them
//   cycle       no action waits for itself by way of program order, values and
//               messages: nothing can hang
//   memory      no rank keeps more than its budget
//   collective  ranks enter the reductions of groups that they share in one
//               order
//
// They are tried in this order and the first fault is returned. The proof holds
// for any speed of ranks and channels. One pass over the actions, no recursion.
//
//   order       every stage makes its weight gradients by ascending micro-batch
//
// is apart from validity: a schedule that lacks it runs, but its sums have
// other bits than those of one process, so training refuses it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "dist/pipeline/memory.h"
#include "dist/pipeline/schedule.h"

namespace tapeline {

enum class Check { kComplete, kChannel, kCycle, kMemory, kCollective, kOrder };
std::string_view name_of(Check check);

struct Refusal {
  Check check = Check::kComplete;
  // The guilty action; one that is missing has the index after the last.
  int rank = 0, index = 0;
  std::string action;
  std::string message;  // one line, without those three
};
// "cycle: rank 0, action 2 (0B0): message".
std::string to_string(const Refusal& refusal);
absl::Status to_status(const Refusal& refusal);

struct Limits {
  // A schedule that is valid with kEnd is so with kEarly.
  OvRelease ov_release = OvRelease::kEnd;
  // Messages that a channel holds before its sender waits; 0: sender and
  // receiver meet. Without a value nobody waits to send.
  std::optional<int> capacity;
  // One queue for all that a rank sends to another, instead of one for each
  // stage edge and direction.
  bool queue_per_rank_pair = false;
  // Most of `holds` at once, for every rank or one each; empty: no limit.
  std::vector<double> budget;
  std::vector<Holds> holds = {Holds{}};
};

// Nothing: the schedule is valid. Its placement must name existing ranks.
std::optional<Refusal> validate(const Schedule& schedule,
                                const Limits& limits = {});

// The first B or W that adds to a stage's weight gradients behind one of a
// later micro-batch; nothing if there is none. F and I may come in any order:
// nothing is added in them.
std::optional<Refusal> check_order_of_sums(const Schedule& schedule);

// The least capacity with which it cannot hang; nothing if none is enough. The
// schedule must be complete, with channels in order.
std::optional<int> min_capacity(const Schedule& schedule, OvRelease release);

}  // namespace tapeline
