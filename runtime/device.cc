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

Device::Device(int threads, DeviceStreams streams, bool dry,
               const DeviceBackend& backend)
    : kind_(backend.kind),
      enter_(backend.enter),
      dry_(dry),
      streams_(std::move(streams)),
      pinned_(MemoryKind::kPinned, dry, backend.pinned),
      pool_(MemoryKind::kDevice, dry, backend.memory),
      threads_(std::make_unique<ThreadPool>(threads)) {
  const auto fill = [&](std::unique_ptr<Stream>& stream, const char* name) {
    if (!stream) stream = std::make_unique<CpuStream>(name, dry);
  };
  fill(streams_.compute, "compute");
  fill(streams_.copy_out, "copy_out");
  fill(streams_.copy_in, "copy_in");
}

void Device::set_threads(int threads) {
  if (threads != threads_->threads()) {
    threads_ = std::make_unique<ThreadPool>(threads);
  }
}

Device& Device::current() {
  return current_device != nullptr ? *current_device : default_device();
}

void DeviceScope::make_current(Device* device) {
  current_device = device;
  if (device != nullptr && device->enter_) device->enter_();
}

DeviceScope::DeviceScope(Device& device) : previous_(current_device) {
  make_current(&device);
}

}  // namespace tapeline
