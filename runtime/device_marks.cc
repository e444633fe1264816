#include "runtime/device_marks.h"

#include "runtime/check.h"
#include "runtime/cuda_check.h"
#include "runtime/profile.h"

namespace tapeline {
namespace {

void reach(cudaEvent_t event) {
  // Who knows that the work has ended does not call what waits.
  const cudaError_t state = cudaEventQuery(event);
  if (state == cudaErrorNotReady) {
    cudaGetLastError();
    CUDA_CHECK(cudaEventSynchronize(event));
  } else {
    CUDA_CHECK(state);
  }
}

}  // namespace

DeviceMarks::~DeviceMarks() {
  for (const Mark& mark : marks_) {
    if (mark.event == nullptr) continue;
    CUDA_CHECK(cudaEventDestroy(static_cast<cudaEvent_t>(mark.event)));
  }
}

void DeviceMarks::clear() {
  const std::lock_guard lock(mutex_);
  used_ = 0;
}

size_t DeviceMarks::mark(const Stream& stream) {
  const std::lock_guard lock(mutex_);
  if (used_ == marks_.size()) marks_.emplace_back();
  Mark& mark = marks_[used_];
  mark.ns = now_ns();
  mark.on_device = stream.native() != nullptr;
  if (mark.on_device) {
    if (mark.event == nullptr) {
      cudaEvent_t made = nullptr;
      CUDA_CHECK(cudaEventCreate(&made));
      mark.event = made;
    }
    CUDA_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(mark.event),
                               static_cast<cudaStream_t>(stream.native())));
  }
  return used_++;
}

double DeviceMarks::ms(size_t mark) const {
  const std::lock_guard lock(mutex_);
  CHECK(mark < used_) << "[marks] " << mark << " of " << used_;
  const Mark &first = marks_[0], &last = marks_[mark];
  if (!first.on_device || !last.on_device) {
    return 1e-6 * static_cast<double>(last.ns - first.ns);
  }
  const auto begin = static_cast<cudaEvent_t>(first.event);
  const auto end = static_cast<cudaEvent_t>(last.event);
  reach(begin);
  reach(end);
  float ms = 0;
  CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
  return static_cast<double>(ms);
}

}  // namespace tapeline
