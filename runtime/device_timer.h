// DeviceTimer: how long work on the current device takes, from one point of its
// compute stream to another: CUDA events there, the clock on a CPU, where work
// is done when its call returns.
//
//   DeviceTimer timer;
//   timer.start();
//   ...             // queue work
//   timer.stop();
//   timer.milliseconds();   // waits for the work, if it has not ended
#pragma once

#include <cstdint>

namespace tapeline {

class DeviceTimer {
 public:
  DeviceTimer();
  ~DeviceTimer();
  DeviceTimer(const DeviceTimer&) = delete;
  DeviceTimer& operator=(const DeviceTimer&) = delete;

  void start();
  void stop();
  double milliseconds() const;

 private:
  void* stream_ = nullptr;  // cudaStream_t; null: the clock
  void* events_[2] = {};    // cudaEvent_t
  int64_t ns_[2] = {};
};

}  // namespace tapeline
