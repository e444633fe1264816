#include "runtime/device_timer.h"

#include "runtime/cuda_check.h"
#include "runtime/device.h"
#include "runtime/profile.h"

namespace tapeline {
namespace {

void record(void* event, void* stream) {
  CUDA_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(event),
                             static_cast<cudaStream_t>(stream)));
}

}  // namespace

DeviceTimer::DeviceTimer() {
  Device& device = Device::current();
  if (device.kind() != DeviceKind::kCuda || device.dry()) return;
  stream_ = device.compute().native();
  for (void*& event : events_) {
    cudaEvent_t made = nullptr;
    CUDA_CHECK(cudaEventCreate(&made));
    event = made;
  }
}

DeviceTimer::~DeviceTimer() {
  for (void* event : events_) {
    if (event == nullptr) continue;
    CUDA_CHECK(cudaEventDestroy(static_cast<cudaEvent_t>(event)));
  }
}

void DeviceTimer::start() {
  ns_[0] = now_ns();
  if (stream_ != nullptr) record(events_[0], stream_);
}

void DeviceTimer::stop() {
  ns_[1] = now_ns();
  if (stream_ != nullptr) record(events_[1], stream_);
}

double DeviceTimer::milliseconds() const {
  if (stream_ == nullptr) return 1e-6 * static_cast<double>(ns_[1] - ns_[0]);
  const auto begin = static_cast<cudaEvent_t>(events_[0]);
  const auto end = static_cast<cudaEvent_t>(events_[1]);
  // Who knows that the work has ended does not call what waits.
  const cudaError_t state = cudaEventQuery(end);
  if (state == cudaErrorNotReady) {
    cudaGetLastError();
    CUDA_CHECK(cudaEventSynchronize(end));
  } else {
    CUDA_CHECK(state);
  }
  float ms = 0;
  CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
  return static_cast<double>(ms);
}

}  // namespace tapeline
