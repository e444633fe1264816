// Some ranks of a communicator as a communicator of their own.
//
// Rank i of the subgroup is `ranks[i]` of the whole. Subgroups that share no
// pair of ranks never meet, since channels belong to pairs; those that do must
// use different channels. Messages of errors name ranks of the whole. Ending
// one ends the whole.
#pragma once

#include <optional>
#include <vector>

#include "dist/communicator.h"

namespace tapeline {

class Subgroup : public Communicator {
 public:
  // Ascending, this rank among them. The whole outlives the subgroup.
  Subgroup(Communicator& whole, std::vector<int> ranks);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  bool sends_wait() const override { return whole_.sends_wait(); }
  absl::StatusOr<Ticket> send(const Envelope& to,
                              const std::vector<TensorSpec>& specs,
                              std::vector<Tensor> parts) override;
  absl::StatusOr<Ticket> receive(const Envelope& from, int slot,
                                 const std::vector<TensorSpec>& specs) override;
  absl::StatusOr<std::vector<Tensor>> wait(Ticket ticket,
                                           absl::Duration timeout) override;
  bool done(Ticket ticket) override { return whole_.done(ticket); }
  void time_messages(DeviceMarks* marks) override {
    whole_.time_messages(marks);
  }
  std::optional<Travel> travel() const override { return whole_.travel(); }
  absl::Status all_reduce(const Collective& collective, const Tensor& x,
                          absl::Duration timeout) override;
  absl::Status barrier(absl::Duration timeout) override;
  void abort(const absl::Status& why) override { whole_.abort(why); }
  void set_position(int64_t position) override {
    whole_.set_position(position);
  }
  std::vector<int64_t> positions() const override;

 private:
  Communicator& whole_;
  const std::vector<int> ranks_;
  int rank_ = 0;
};

}  // namespace tapeline
