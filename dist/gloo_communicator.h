// Ranks as processes, over TCP: the communicator of CPU jobs across machines.
//
// Gloo moves the bytes and nothing else; sums are made here, in the order of
// ranks. A message is a header and its bytes. The receiver compares the header
// with what it expects before it gives room for the bytes, and the bytes with
// the header's hash, so a message that is cut short, of another shape or out of
// order is an error on the receiver, and then on all. Each channel has a thread
// of its own on either side, so no channel holds up another.
//
// A rank that dies ends its connections, and so the waits of the others for it.
// One that stalls is found by the caller's timeouts. Exceptions of the library
// end here, as errors that name rank, action and peer.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dist/communicator.h"
#include "dist/launch.h"

namespace tapeline {

struct GlooOptions {
  absl::Duration connect_timeout = absl::Seconds(60);
  // For tests: the message of this number, from 0, that the rank sends loses
  // its last bytes.
  std::optional<int64_t> truncate;
};

class GlooCommunicator : public Communicator {
 public:
  // Connects all ranks with each other, by way of the store of rank 0, which it
  // serves. Blocks until all are there, or the timeout.
  static absl::StatusOr<std::unique_ptr<GlooCommunicator>> connect(
      const Launched& launch, const GlooOptions& options = {});
  ~GlooCommunicator() override;

  int rank() const override;
  int size() const override;
  bool sends_wait() const override { return false; }
  absl::StatusOr<Ticket> send(const Envelope& to,
                              const std::vector<TensorSpec>& specs,
                              std::vector<Tensor> parts) override;
  absl::StatusOr<Ticket> receive(const Envelope& from, int slot,
                                 const std::vector<TensorSpec>& specs) override;
  absl::StatusOr<std::vector<Tensor>> wait(Ticket ticket,
                                           absl::Duration timeout) override;
  bool done(Ticket ticket) override;
  absl::Status all_reduce(const Collective& collective, const Tensor& x,
                          absl::Duration timeout) override;
  absl::Status barrier(absl::Duration timeout) override;
  void abort(const absl::Status& why) override;
  // Told to the store a few times a second.
  void set_position(int64_t position) override;
  std::vector<int64_t> positions() const override;

  struct State;

 private:
  explicit GlooCommunicator(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace tapeline
