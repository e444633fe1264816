// Streams and events: where work is queued, and how one queue waits for
// another.
//
// A Stream is an ordered queue of copies, waits and records on one device. An
// Event is a point of a stream's order, a value: recording creates nothing and
// allocates nothing. The CPU backend runs every call at once, so its events are
// done when made. The fake backend (fake_stream.h) completes work when a test
// says so, and a CUDA stream (cuda_stream.h) when the device did it. Streams
// outlive the events that name them.
// One thread at a time may call a stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "runtime/shape.h"

namespace tapeline {

class Stream;

struct Event {
  const Stream* stream = nullptr;  // null: nothing to wait for
  uint64_t sequence = 0;

  bool done() const;
};

class Stream {
 public:
  explicit Stream(std::string name) : name_(std::move(name)) {}
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  const std::string& name() const { return name_; }
  // The cudaStream_t of a CUDA stream; null for any other.
  virtual void* native() const { return nullptr; }

  // Declares that work queued from now on reads or writes the bytes; for a
  // stream that checks orders (fake_device.h).
  virtual void access(const void*, size_t, bool /*write*/) {}
  // Copies bytes once everything queued before has completed.
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
  // The caller's bytes to the device, and back. On return they may change, or
  // are there. Like the next two, at once where kernels run at once.
  virtual void upload(void* to, const void* from, size_t bytes);
  virtual void download(void* to, const void* from, size_t bytes);
  // `count` copies of an element of 1, 2, 4 or 8 bytes.
  virtual void fill(void* to, const void* element, size_t size, int64_t count);
  // The elements of a strided tensor, in row-major order.
  virtual void gather(void* to, const void* from, size_t size,
                      const Shape& shape, const Shape& strides);
  // The point after everything queued so far.
  virtual Event record() = 0;
  // Later work of this stream starts after the event.
  virtual void wait(const Event& event) = 0;
  // Blocks the caller until the event is done.
  virtual void synchronize(const Event& event) = 0;
  // The last completed point: record()ed sequences <= this are done.
  virtual uint64_t completed() const = 0;
  virtual bool done(uint64_t sequence) const { return completed() >= sequence; }

 private:
  std::string name_;
};

inline bool Event::done() const {
  return stream == nullptr || stream->done(sequence);
}

// Executes at once on the calling thread; a dry one (device.h) moves nothing.
class CpuStream : public Stream {
 public:
  explicit CpuStream(std::string name, bool dry = false)
      : Stream(std::move(name)), dry_(dry) {}
  void copy(void* to, const void* from, size_t bytes) override;
  Event record() override { return {this, 0}; }
  void wait(const Event& event) override;
  void synchronize(const Event& event) override { wait(event); }
  uint64_t completed() const override { return 0; }

 private:
  bool dry_;
};

}  // namespace tapeline
