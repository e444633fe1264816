// Communicator: one rank's way to the others.
//
// Messages travel on logical channels: a channel is an ordered queue from one
// rank to another, made for one direction of one stage edge. Both ends know
// what a message looks like before it is sent (dtype and shape of each part),
// so none announces itself; the header that travels with it is compared, and a
// difference ends the group. A part may be absent: a gradient that nothing
// flowed into.
//
// send() and receive() return at once. The bytes given to send() are not
// written, and those given to receive() not touched, until wait() says that the
// ticket is done; then the sender's handle is dropped, the receiver's returned.
// A slot is a place for one message that has been asked for and not been taken.
//
// An error names rank, what it did, and the peer. After the first one, or after
// abort(), every call of every rank returns it, or that the connection is gone.
// A communicator is used by its rank's thread alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "runtime/device_marks.h"
#include "runtime/tensor.h"

namespace tapeline {

// What a part of a message is.
struct TensorSpec {
  DType dtype = DType::kF32;
  Shape shape;
  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};
// f32[4, 8] i32[4, 2]
std::string to_string(const std::vector<TensorSpec>& specs);

// Where a message goes to or comes from, and which one it is.
struct Envelope {
  int peer = 0, channel = 0, micro_batch = 0;
};

// A collective that some ranks enter together. Its name and members are those
// of all who enter.
struct Collective {
  std::string name;
  std::vector<int> ranks;  // ascending
};

// When a message was under way: both ends were ready for it, until all of it
// was there.
struct Travel {
  size_t begin = 0, end = 0;  // marks
};

class Communicator {
 public:
  using Ticket = int64_t;
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Whether a sender is to wait() for its message before it goes on: a channel
  // holds only so many.
  virtual bool sends_wait() const = 0;
  // Contiguous tensors of the current device; undefined: absent.
  virtual absl::StatusOr<Ticket> send(const Envelope& to,
                                      const std::vector<TensorSpec>& specs,
                                      std::vector<Tensor> parts) = 0;
  // The parts are written into tensors of the current device.
  virtual absl::StatusOr<Ticket> receive(
      const Envelope& from, int slot, const std::vector<TensorSpec>& specs) = 0;
  // The parts of a message received, nothing for one that was sent.
  // DeadlineExceeded: not yet, the ticket is still good.
  virtual absl::StatusOr<std::vector<Tensor>> wait(Ticket ticket,
                                                   absl::Duration timeout) = 0;
  // Whether wait() would return at once.
  virtual bool done(Ticket ticket) = 0;

  // Where messages move while the host does something else: marks when those
  // that are asked for from now on were under way; null: no longer.
  virtual void time_messages(DeviceMarks* /*marks*/) {}
  // Of the message that wait() gave last, if it was timed.
  virtual std::optional<Travel> travel() const { return {}; }

  // x := the sum of all members' x, added in the order of ranks. f32, f64, i64.
  virtual absl::Status all_reduce(const Collective& collective, const Tensor& x,
                                  absl::Duration timeout) = 0;
  // Of all ranks.
  virtual absl::Status barrier(absl::Duration timeout) = 0;

  // Drops this rank's messages and ends everybody's waits with `why`, which is
  // an error. The first one counts.
  virtual void abort(const absl::Status& why) = 0;

  // For reports of who is late: any number from 0 on; -1 where it is not known.
  virtual void set_position(int64_t position) = 0;
  virtual std::vector<int64_t> positions() const = 0;
};

}  // namespace tapeline
