// A stream whose work completes when the test says so: copies move real bytes
// at completion time, not at issue time.
#pragma once

#include <cstdint>
#include <deque>

#include "runtime/stream.h"

namespace tapeline {

class FakeStream : public Stream {
 public:
  using Stream::Stream;

  void copy(void* to, const void* from, size_t bytes) override;
  Event record() override { return {this, issued_}; }
  void wait(const Event& event) override;
  // Completes this stream's work up to the event, and what it waits for.
  void synchronize(const Event& event) override;
  uint64_t completed() const override { return completed_; }

  // Completes up to `count` queued operations; stops at a wait whose event is
  // not done. Returns how many completed.
  int advance(int count = 1);
  int pending() const { return static_cast<int>(queue_.size()); }
  int64_t bytes_copied() const { return bytes_copied_; }

 private:
  struct Operation {
    void* to = nullptr;
    const void* from = nullptr;
    size_t bytes = 0;
    Event wait;
  };
  std::deque<Operation> queue_;
  uint64_t issued_ = 0, completed_ = 0;
  int64_t bytes_copied_ = 0;
};

}  // namespace tapeline
