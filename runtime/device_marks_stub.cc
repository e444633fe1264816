#include "runtime/check.h"
#include "runtime/device_marks.h"
#include "runtime/profile.h"

namespace tapeline {

DeviceMarks::~DeviceMarks() = default;

void DeviceMarks::clear() {
  const std::lock_guard lock(mutex_);
  used_ = 0;
}

size_t DeviceMarks::mark(const Stream&) {
  const std::lock_guard lock(mutex_);
  if (used_ == marks_.size()) marks_.emplace_back();
  marks_[used_].ns = now_ns();
  return used_++;
}

double DeviceMarks::ms(size_t mark) const {
  const std::lock_guard lock(mutex_);
  CHECK(mark < used_) << "[marks] " << mark << " of " << used_;
  return 1e-6 * static_cast<double>(marks_[mark].ns - marks_[0].ns);
}

}  // namespace tapeline
