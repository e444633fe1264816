#include "runtime/device.h"

#include <utility>

namespace tapeline {
namespace {

thread_local Device* current_device = nullptr;

// Leaked on purpose: tensors with static lifetime may outlive any order of
// destruction.
Device& default_device() {
  static Device& device = *new Device(1);
  return device;
}

}  // namespace

Device::Device(int threads, std::unique_ptr<Stream> compute)
    : compute_(compute ? std::move(compute)
                       : std::make_unique<CpuStream>("compute")),
      threads_(std::make_unique<ThreadPool>(threads)) {}

void Device::set_threads(int threads) {
  if (threads != threads_->threads()) {
    threads_ = std::make_unique<ThreadPool>(threads);
  }
}

Device& Device::current() {
  return current_device != nullptr ? *current_device : default_device();
}

DeviceScope::DeviceScope(Device& device) : previous_(current_device) {
  current_device = &device;
}
DeviceScope::~DeviceScope() { current_device = previous_; }

}  // namespace tapeline
