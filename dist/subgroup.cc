#include "dist/subgroup.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dist/all_gather.h"
#include "runtime/check.h"

namespace tapeline {

Subgroup::Subgroup(Communicator& whole, std::vector<int> ranks)
    : whole_(whole), ranks_(std::move(ranks)) {
  const auto at = std::lower_bound(ranks_.begin(), ranks_.end(), whole.rank());
  CHECK(std::is_sorted(ranks_.begin(), ranks_.end()) && at != ranks_.end() &&
        *at == whole.rank())
      << "[subgroup] rank " << whole.rank() << " is none of it";
  rank_ = static_cast<int>(at - ranks_.begin());
}

absl::StatusOr<Communicator::Ticket> Subgroup::send(
    const Envelope& to, const std::vector<TensorSpec>& specs,
    std::vector<Tensor> parts) {
  Envelope out = to;
  out.peer = ranks_.at(to.peer);
  return whole_.send(out, specs, std::move(parts));
}

absl::StatusOr<Communicator::Ticket> Subgroup::receive(
    const Envelope& from, int slot, const std::vector<TensorSpec>& specs) {
  Envelope in = from;
  in.peer = ranks_.at(from.peer);
  return whole_.receive(in, slot, specs);
}

absl::StatusOr<std::vector<Tensor>> Subgroup::wait(Ticket ticket,
                                                   absl::Duration timeout) {
  return whole_.wait(ticket, timeout);
}

absl::Status Subgroup::all_reduce(const Collective& collective, const Tensor& x,
                                  absl::Duration timeout) {
  Collective of_whole{collective.name, {}};
  for (const int r : collective.ranks) of_whole.ranks.push_back(ranks_.at(r));
  // Other subgroups may be in one of the same name.
  absl::StrAppend(&of_whole.name, " of ranks ",
                  absl::StrJoin(of_whole.ranks, " "));
  return whole_.all_reduce(of_whole, x, timeout);
}

absl::Status Subgroup::barrier(absl::Duration timeout) {
  return all_reduce(everyone(*this, "barrier of a subgroup"),
                    Tensor::empty({0}, DType::kF32), timeout);
}

std::vector<int64_t> Subgroup::positions() const {
  const std::vector<int64_t> all = whole_.positions();
  std::vector<int64_t> out;
  for (const int r : ranks_) out.push_back(all.at(r));
  return out;
}

}  // namespace tapeline
