#include "tools/train/host_tensors.h"

#include <utility>

#include "runtime/check.h"
#include "runtime/device.h"

namespace tapeline {

HostTensors::~HostTensors() {
  Stream& stream = Device::current().compute();
  for (const StoragePtr& storage : leased_) storage->release(stream, false);
}

void HostTensors::add(std::string name, const Tensor& tensor) {
  const Tensor whole = tensor.contiguous() ? tensor : tensor.clone();
  const StoragePtr& storage = whole.storage();
  Stream& stream = Device::current().compute();
  const std::byte* bytes =
      storage->acquire(stream) +
      whole.offset() * static_cast<int64_t>(size_of(whole.dtype()));
  leased_.push_back(storage);
  if (storage->device().kind() != DeviceKind::kCpu) {
    std::vector<std::byte>& copy =
        copies_.emplace_back(static_cast<size_t>(whole.bytes()));
    stream.download(copy.data(), bytes, copy.size());
    bytes = copy.data();
  }
  list_.push_back({std::move(name), whole.dtype(), whole.shape(), bytes});
}

}  // namespace tapeline
