#include "runtime/fake_stream.h"

#include <cstring>

#include "runtime/check.h"

namespace tapeline {

void FakeStream::copy(void* to, const void* from, size_t bytes) {
  queue_.push_back({to, from, bytes, {}});
  ++issued_;
}

void FakeStream::wait(const Event& event) {
  queue_.push_back({nullptr, nullptr, 0, event});
  ++issued_;
}

int FakeStream::advance(int count) {
  int ran = 0;
  while (ran < count && !queue_.empty()) {
    const Operation& operation = queue_.front();
    if (!operation.wait.done()) break;
    if (operation.bytes > 0) {
      std::memcpy(operation.to, operation.from, operation.bytes);
      bytes_copied_ += static_cast<int64_t>(operation.bytes);
    }
    queue_.pop_front();
    ++completed_;
    ++ran;
  }
  return ran;
}

void FakeStream::synchronize(const Event& event) {
  if (event.stream != this) {
    if (!event.done()) {
      const_cast<Stream*>(event.stream)->synchronize(event);
    }
    return;
  }
  while (completed_ < event.sequence) {
    CHECK(!queue_.empty()) << "event " << event.sequence << " of stream "
                           << name() << " was never issued";
    const Event first = queue_.front().wait;
    if (!first.done()) synchronize(first);
    CHECK_EQ(advance(1), 1) << "stream " << name() << " waits for itself";
  }
}

}  // namespace tapeline
