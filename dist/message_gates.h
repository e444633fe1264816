// Where the two ends of a message meet before it moves.
//
// A receive that NCCL has begun keeps processors of the GPU busy until its
// sender comes, and calls of CUDA that wait for all of a GPU (for memory, for
// code) wait for it too: a host that makes one then never gets to what the
// sender waits for. So an end says when its bytes, or their place, are ready,
// and a message is begun when both have said so: then it ends by itself.
//
// The word is a count of messages, per route and end. Processes of one host
// keep it in memory that they share; over several hosts it goes through the
// store, which takes a round trip. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dist/launch.h"
#include "dist/tcp_store.h"

namespace tapeline {

class MessageGates {
 public:
  // Entered by all ranks together, for so many routes. `share` false: as if on
  // several hosts.
  static absl::StatusOr<std::unique_ptr<MessageGates>> make(
      int routes, const Launched& launch, absl::Duration timeout,
      bool share = true);
  ~MessageGates();
  MessageGates(const MessageGates&) = delete;
  MessageGates& operator=(const MessageGates&) = delete;

  bool shared() const { return memory_ != nullptr; }
  // This process's end of a route is ready for its `count`-th message, from 1
  // on.
  absl::Status come(int route, bool sends, uint32_t count);
  // Whether that end of the route, another process's, is.
  absl::StatusOr<bool> came(int route, bool sends, uint32_t count);

 private:
  explicit MessageGates(size_t places) : known_(places) {}

  std::unique_ptr<TcpStore> store_;
  void* memory_ = nullptr;
  size_t bytes_ = 0;
  std::vector<uint32_t> known_;  // what the store said last, by place
};

}  // namespace tapeline
