// A stream of a CUDA device.
//
// A sequence number is a place in the stream's order. record() only counts: the
// CUDA event of a place is made when somebody waits for it, or at once where a
// copy was queued, whose end others wait for exactly. An event made late stands
// for everything queued until then, which is later than asked for and so safe;
// before that the place does not count as done.
// That is wrong for a stream whose later work may wait for what the asker does
// next, as a receiver's waits for an answer that its sender has not made: such
// a stream marks every place at once. The events are a ring made beforehand;
// for a place whose event has been used again the next newer one stands. So a
// step records, waits and asks without creating anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/stream.h"

struct CUstream_st;
struct CUevent_st;

namespace tapeline {

// When the CUDA event of a place in a stream's order is made.
enum class Marks { kWhenAsked, kAtOnce };

class CudaStream : public Stream {
 public:
  // On the GPU that is current on this thread; one that does not wait for the
  // legacy default stream.
  explicit CudaStream(std::string name, Marks marks = Marks::kWhenAsked);
  ~CudaStream() override;

  // Who asks is about to queue work.
  void* native() const override {
    queued_ = true;
    return stream_;
  }

  void copy(void* to, const void* from, size_t bytes) override;
  void upload(void* to, const void* from, size_t bytes) override;
  void download(void* to, const void* from, size_t bytes) override;
  void fill(void* to, const void* element, size_t size, int64_t count) override;
  void gather(void* to, const void* from, size_t size, const Shape& shape,
              const Shape& strides) override;
  Event record() override;
  void wait(const Event& event) override;
  void synchronize(const Event& event) override;
  bool done(uint64_t sequence) const override;
  uint64_t completed() const override;

  // CUDA events recorded so far.
  int64_t events_recorded() const { return events_recorded_; }

 private:
  struct Marker {
    CUevent_st* event = nullptr;
    uint64_t sequence = 0;  // 0: not recorded yet
  };
  // The event that stands for a place.
  Marker& marker(uint64_t sequence) const;
  Marker& mark() const;

  const Marks marks_;
  CUstream_st* stream_ = nullptr;
  uint64_t issued_ = 0;
  bool copied_ = false;
  mutable bool queued_ = false;  // work that no sequence number covers yet
  mutable std::vector<Marker> ring_;
  mutable size_t newest_ = 0;
  mutable uint64_t completed_ = 0;
  mutable int64_t events_recorded_ = 0;

  // Pinned memory that uploads go through, half by half; an event for each.
  std::byte* staging_ = nullptr;
  Event staged_[2];
  int half_ = 0;
  size_t used_ = 0;  // of the half
};

}  // namespace tapeline
