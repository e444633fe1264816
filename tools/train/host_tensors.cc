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
  CHECK(storage->device().kind() == DeviceKind::kCpu) << name;
  const std::byte* bytes = storage->acquire(Device::current().compute());
  leased_.push_back(storage);
  list_.push_back(
      {std::move(name), whole.dtype(), whole.shape(),
       bytes + whole.offset() * static_cast<int64_t>(size_of(whole.dtype()))});
}

}  // namespace tapeline
