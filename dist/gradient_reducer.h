// Adds up the gradients of replicas, in the order of ranks, while they still
// compute.
//
//   RETURN_IF_ERROR(reducer.begin(stage, sums));   // its gradients are whole
//   ...                                            // other stages' passes
//   RETURN_IF_ERROR(reducer.finish());             // all sums are everybody's
//
// A bucket is cut into as many parts as there are replicas. Everyone sends part
// i to replica i, which adds rank 0's, rank 1's, ... and sends the sum back to
// all: the same bits on all replicas and in every run, and 2 (n-1)/n of the
// bytes. The first half is under way as soon as begin() returns; progress()
// moves on what has arrived. Sums are f32 and stay the caller's: they are
// written by finish(). Used by one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "dist/communicator.h"
#include "runtime/tensor.h"

namespace tapeline {

// Its channels between any two replicas, in each direction: addends and sums.
inline constexpr int kReducerChannels[] = {1 << 22, (1 << 22) + 1};

struct ReducerCounters {
  int64_t buckets = 0;
  int64_t sent_bytes = 0;
  double waited_seconds = 0;  // in finish()
};

class GradientReducer {
 public:
  // Of the replicas alone. Outlives the reducer.
  GradientReducer(Communicator& replicas, absl::Duration deadline);

  // Buckets have numbers from 0 on; each is begun at most once between two
  // finish(), by all replicas, with tensors of the same sizes.
  absl::Status begin(int bucket, std::vector<Tensor> sums);
  absl::Status progress();
  absl::Status finish();
  // Since it was made.
  const ReducerCounters& counters() const { return counters_; }

 private:
  using Ticket = Communicator::Ticket;
  struct Bucket {
    int number = 0;
    std::vector<Tensor> sums;
    Tensor flat;                       // all of them, one behind the other
    std::vector<Ticket> mine, theirs;  // by peer: addends, sums
    bool added = false;
  };
  struct Range {
    int64_t begin = 0, end = 0;
  };

  Range part(const Bucket& bucket, int rank) const;
  absl::StatusOr<Ticket> send(const Bucket& bucket, int half, int peer,
                              const Tensor& x);
  absl::StatusOr<Ticket> receive(const Bucket& bucket, int half, int peer,
                                 int64_t elements);
  absl::StatusOr<Tensor> take(Ticket ticket);
  bool arrived(const std::vector<Ticket>& tickets);
  absl::Status add(Bucket& bucket);
  absl::Status spread(Bucket& bucket);

  Communicator& replicas_;
  const absl::Duration deadline_;
  std::vector<std::unique_ptr<Bucket>> open_;  // in the order of begin()
  std::vector<Ticket> sending_;
  int slot_ = 0;
  ReducerCounters counters_;
};

}  // namespace tapeline
