#include "absl/status/status.h"
#include "runtime/cuda_device.h"

namespace tapeline {
namespace {

absl::Status not_built() {
  return absl::FailedPreconditionError(
      "this binary was built without CUDA: build with --config=cuda, or choose "
      "device = \"cpu\"");
}

}  // namespace

int cuda_devices() { return 0; }

absl::StatusOr<std::unique_ptr<Device>> make_cuda_device(int, int) {
  return not_built();
}

SystemMemory cuda_pinned_memory() { return {}; }

absl::StatusOr<CudaProperties> cuda_properties(int) { return not_built(); }

}  // namespace tapeline
