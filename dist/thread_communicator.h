// Ranks as threads of one process: the communicator of tests and CPU demos.
//
// A message is copied from the sender's buffer into the receiver's slot when
// both are there; then the sender's buffer is overwritten with NaN patterns,
// unless somebody else still holds it, and dropped. Nothing moves but while
// some rank waits. With a capacity a message is first copied into the channel,
// which holds so many; 0: the sender waits for the receiver. Delays and the
// order in which messages arrive that are under way together can be chosen: a
// program that is right for one order only is found here.
//
// Whoever enters a collective without belonging to it, or with other members
// than the rest, ends the group.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/time/time.h"
#include "dist/communicator.h"

namespace tapeline {

// Which of the messages that could arrive now arrives first.
enum class ArrivalOrder : uint8_t { kOldestFirst, kNewestFirst, kRandom };

struct ThreadOptions {
  // Messages that a channel holds before its sender waits; without a value
  // nobody waits to send.
  std::optional<int> capacity;
  bool poison = true;
  ArrivalOrder order = ArrivalOrder::kOldestFirst;
  absl::Duration max_delay;  // of a message, drawn from 0 on
  uint64_t seed = 1;
};

class ThreadGroup {
 public:
  explicit ThreadGroup(int ranks, const ThreadOptions& options = {});
  ~ThreadGroup();
  // For the thread that runs the rank; lives as long as the group.
  Communicator& rank(int rank);
  // The error that ended the group.
  absl::Status status() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace tapeline
