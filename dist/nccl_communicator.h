// Ranks as processes with a GPU each, over NCCL: the communicator of GPU jobs.
//
// Each channel of a pair of ranks has an NCCL communicator and a stream of its
// own, so no channel holds up another; each set of ranks that sums has one.
// All are made and used once at the start, in one order on all ranks, and none
// later: what is not in the list is an error.
//
// The host never waits: send() and receive() queue behind what made or frees
// the bytes, wait() returns what later work of the device finds there in time.
// Absent parts travel as zeros. Messages are not announced and carry no header:
// ranks that expect other sizes hang, and are found by their deadline. A side
// thread watches; it aborts everything when something has taken too long or
// NCCL reports an error, and the next call of the rank returns why, with the
// last operations of the rank.
//
// f32 and f64 sums are made here, in the order of ranks. Used by the thread of
// the device, which is current.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

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
  // Of an operation, from when it was queued.
  absl::Duration deadline = absl::Minutes(10);
};

// Blocks until all ranks have made and tried all communicators. In a build
// without CUDA: Unimplemented.
absl::StatusOr<std::unique_ptr<Communicator>> connect_nccl(
    const Launched& launch, const NcclOptions& options);

}  // namespace tapeline
