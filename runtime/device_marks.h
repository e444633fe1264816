// Points in the order of a device's streams, and when they were reached.
//
//   DeviceMarks marks;
//   const size_t begin = marks.mark(device.compute());
//   ...                         // queue work
//   const size_t end = marks.mark(device.compute());
//   marks.ms(end) - marks.ms(begin)
//
// On a GPU a mark is reached when the stream gets there, and the host does not
// wait for it; elsewhere, where streams do their work at once, it is the clock.
// CUDA events are made when there are more marks than ever before, so a steady
// step makes none. mark() from any thread that has the device as its current
// one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>

#include "runtime/stream.h"

namespace tapeline {

class DeviceMarks {
 public:
  DeviceMarks() = default;
  ~DeviceMarks();
  DeviceMarks(const DeviceMarks&) = delete;
  DeviceMarks& operator=(const DeviceMarks&) = delete;

  void clear();
  // After what is queued on the stream. Returns its number.
  size_t mark(const Stream& stream);
  // Since mark 0; blocks until both are reached.
  double ms(size_t mark) const;

 private:
  struct Mark {
    int64_t ns = 0;
    void* event = nullptr;  // cudaEvent_t
    bool on_device = false;
  };
  mutable std::mutex mutex_;
  std::deque<Mark> marks_;
  size_t used_ = 0;
};

}  // namespace tapeline
