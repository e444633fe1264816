#include "tools/train/open_device.h"

#include <algorithm>

#include "runtime/check.h"
#include "runtime/cuda_device.h"

namespace tapeline {

DeviceKind device_kind(const std::string& name) {
  if (name == "auto") {
    return cuda_devices() > 0 ? DeviceKind::kCuda : DeviceKind::kCpu;
  }
  CHECK(name == "cpu" || name == "cuda") << name;
  return name == "cuda" ? DeviceKind::kCuda : DeviceKind::kCpu;
}

absl::StatusOr<std::unique_ptr<Device>> open_device(const std::string& name,
                                                    int index) {
  if (device_kind(name) == DeviceKind::kCpu) return nullptr;
  return make_cuda_device(index % std::max(1, cuda_devices()),
                          Device::current().threads().threads());
}

}  // namespace tapeline
