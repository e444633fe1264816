// Ranks as processes with a GPU each, over NCCL: the communicator of GPU jobs.
//
// Each channel of a pair of ranks has an NCCL communicator and a stream of its
// own, so no channel holds up another; each set of ranks that sums has one.
// All are made and used once at the start, in one order on all ranks, and none
// later: what is not in the list is an error.
//
// A message is begun when its bytes and their place are ready, which the two
// ends tell each other (message_gates.h), by a side thread: nothing is queued
// on a device that could wait there for what another process has not done yet.
// send() and receive() return at once, wait() when the message has begun; later
// work of the device waits for its bytes. Absent parts travel as zeros.
// Messages carry no header: ranks that expect other sizes hang, and are found
// by their deadline. Another side thread watches; it aborts everything when
// something that has begun takes too long or NCCL reports an error, and the
// next call of the rank returns why, with the last operations of the rank.
//
// f32 and f64 sums are made here, in the order of ranks. Used by the thread of
// the device, which is current.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dist/communicator.h"
#include "dist/launch.h"

namespace tapeline {

// Messages of a channel, from one rank to another.
struct NcclRoute {
  int from = 0, to = 0, channel = 0;
  friend bool operator==(const NcclRoute&, const NcclRoute&) = default;
};

struct NcclOptions {
  // The same on all ranks, in one order.
  std::vector<NcclRoute> routes;
  std::vector<std::vector<int>> groups;  // each ascending
  absl::Duration connect_timeout = absl::Seconds(60);
  // Of an operation, from when it was begun.
  absl::Duration deadline = absl::Minutes(10);
  // Called 8 seconds after the first error, by another thread, in a process
  // that has not ended by then: an aborted device may never let go of the
  // thread that waits for it. May be null.
  std::function<void(const absl::Status&)> last_resort;
};

// Blocks until all ranks have made and tried all communicators. In a build
// without CUDA: Unimplemented.
absl::StatusOr<std::unique_ptr<Communicator>> connect_nccl(
    const Launched& launch, const NcclOptions& options);

}  // namespace tapeline
