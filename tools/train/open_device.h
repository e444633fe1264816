// The device that a run's settings name.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "runtime/device.h"

namespace tapeline {

// "cpu", "cuda", or "auto": a GPU where there is one.
DeviceKind device_kind(const std::string& name);

// A GPU as a device, its host side with as many threads as the current one;
// null for the CPU, which is there. An error where no GPU is. `index`: which
// GPU, modulo how many there are.
absl::StatusOr<std::unique_ptr<Device>> open_device(const std::string& name,
                                                    int index = 0);

}  // namespace tapeline
