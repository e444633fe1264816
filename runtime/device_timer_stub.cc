#include "runtime/device_timer.h"
#include "runtime/profile.h"

namespace tapeline {

DeviceTimer::DeviceTimer() = default;
DeviceTimer::~DeviceTimer() = default;
void DeviceTimer::start() { ns_[0] = now_ns(); }
void DeviceTimer::stop() { ns_[1] = now_ns(); }
double DeviceTimer::milliseconds() const {
  return 1e-6 * static_cast<double>(ns_[1] - ns_[0]);
}

}  // namespace tapeline
