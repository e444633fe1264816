#include "dist/gradient_reducer.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "kernels/elementwise/elementwise.h"
#include "runtime/access.h"
#include "runtime/check.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

// Behind the slots of stages and groups.
constexpr int kFirstSlot = 1 << 22;
constexpr Communicator::Ticket kNone = -1;

void copy_f32(const Tensor& from, const Tensor& to) {
  copy<float>(launch(), read<float>(from), write<float>(to));
}

}  // namespace

GradientReducer::GradientReducer(Communicator& replicas,
                                 absl::Duration deadline)
    : replicas_(replicas), deadline_(deadline) {}

GradientReducer::Range GradientReducer::part(const Bucket& bucket,
                                             int rank) const {
  const int64_t n = bucket.flat.elements(), ranks = replicas_.size();
  return {n * rank / ranks, n * (rank + 1) / ranks};
}

absl::StatusOr<Communicator::Ticket> GradientReducer::send(const Bucket& bucket,
                                                           int half, int peer,
                                                           const Tensor& x) {
  if (x.elements() == 0) return kNone;
  counters_.sent_bytes += x.bytes();
  const TensorSpec spec = {x.dtype(), x.shape()};
  ASSIGN_OR_RETURN(const Ticket ticket,
                   replicas_.send({peer, kReducerChannels[half], bucket.number},
                                  {spec}, {x}));
  sending_.push_back(ticket);
  return ticket;
}

absl::StatusOr<Communicator::Ticket> GradientReducer::receive(
    const Bucket& bucket, int half, int peer, int64_t elements) {
  if (elements == 0) return kNone;
  return replicas_.receive({peer, kReducerChannels[half], bucket.number},
                           kFirstSlot + slot_++, {{DType::kF32, {elements}}});
}

absl::StatusOr<Tensor> GradientReducer::take(Ticket ticket) {
  ASSIGN_OR_RETURN(const std::vector<Tensor> parts,
                   replicas_.wait(ticket, deadline_));
  CHECK(parts.size() == 1 && parts[0]);
  return parts[0];
}

bool GradientReducer::arrived(const std::vector<Ticket>& tickets) {
  return std::all_of(tickets.begin(), tickets.end(), [&](Ticket ticket) {
    return ticket == kNone || replicas_.done(ticket);
  });
}

absl::Status GradientReducer::begin(int bucket, std::vector<Tensor> sums) {
  if (replicas_.size() == 1) return absl::OkStatus();
  auto b = std::make_unique<Bucket>();
  b->number = bucket;
  b->sums = std::move(sums);
  int64_t elements = 0;
  for (const Tensor& x : b->sums) {
    CHECK(x.dtype() == DType::kF32 && x.contiguous()) << "[reduce] " << x;
    elements += x.elements();
  }
  b->flat = Tensor::empty({elements}, DType::kF32, Tag::kGradient);
  int64_t at = 0;
  for (const Tensor& x : b->sums) {
    const int64_t n = x.elements();
    if (n > 0) copy_f32(x.view_as({n}), b->flat.slice(0, at, at + n));
    at += n;
  }
  const int me = replicas_.rank();
  const Range mine = part(*b, me);
  for (int peer = 0; peer < replicas_.size(); ++peer) {
    b->mine.push_back(kNone);
    b->theirs.push_back(kNone);
    if (peer == me) continue;
    const Range of = part(*b, peer);
    // A copy: the bytes given away may be overwritten once they have left.
    RETURN_IF_ERROR(
        send(*b, 0, peer, b->flat.slice(0, of.begin, of.end).clone()).status());
    ASSIGN_OR_RETURN(b->mine.back(),
                     receive(*b, 0, peer, mine.end - mine.begin));
    ASSIGN_OR_RETURN(b->theirs.back(), receive(*b, 1, peer, of.end - of.begin));
  }
  ++counters_.buckets;
  open_.push_back(std::move(b));
  return progress();
}

// The sum of this replica's part, in the order of ranks, to all.
absl::Status GradientReducer::add(Bucket& bucket) {
  const int me = replicas_.rank();
  const Range mine = part(bucket, me);
  bucket.added = true;
  if (mine.begin == mine.end) return absl::OkStatus();
  const Tensor here = bucket.flat.slice(0, mine.begin, mine.end);
  Tensor sum;
  for (int rank = 0; rank < replicas_.size(); ++rank) {
    Tensor addend = here;
    if (rank != me) {
      ASSIGN_OR_RETURN(addend, take(bucket.mine[rank]));
    }
    if (!sum) {
      sum = addend.clone();
    } else {
      accumulate<float>(launch(), read<float>(addend), write<float>(sum));
    }
  }
  copy_f32(sum, here);
  for (int peer = 0; peer < replicas_.size(); ++peer) {
    if (peer == me) continue;
    RETURN_IF_ERROR(send(bucket, 1, peer, sum.clone()).status());
  }
  return absl::OkStatus();
}

absl::Status GradientReducer::progress() {
  // In order: sums travel in the order in which the others ask for them.
  for (const auto& bucket : open_) {
    if (bucket->added) continue;
    if (!arrived(bucket->mine)) break;
    RETURN_IF_ERROR(add(*bucket));
  }
  return absl::OkStatus();
}

// The other replicas' sums, and all of them where the caller has them.
absl::Status GradientReducer::spread(Bucket& bucket) {
  for (int peer = 0; peer < replicas_.size(); ++peer) {
    if (bucket.theirs[peer] == kNone) continue;
    ASSIGN_OR_RETURN(const Tensor sum, take(bucket.theirs[peer]));
    const Range of = part(bucket, peer);
    copy_f32(sum, bucket.flat.slice(0, of.begin, of.end));
  }
  int64_t at = 0;
  for (const Tensor& x : bucket.sums) {
    const int64_t n = x.elements();
    if (n > 0) copy_f32(bucket.flat.slice(0, at, at + n), x.view_as({n}));
    at += n;
  }
  return absl::OkStatus();
}

absl::Status GradientReducer::finish() {
  const absl::Time begin = absl::Now();
  for (const auto& bucket : open_) {
    if (!bucket->added) RETURN_IF_ERROR(add(*bucket));
  }
  for (const auto& bucket : open_) RETURN_IF_ERROR(spread(*bucket));
  for (const Ticket ticket : std::exchange(sending_, {})) {
    RETURN_IF_ERROR(replicas_.wait(ticket, deadline_).status());
  }
  open_.clear();
  slot_ = 0;
  counters_.waited_seconds += absl::ToDoubleSeconds(absl::Now() - begin);
  return absl::OkStatus();
}

}  // namespace tapeline
