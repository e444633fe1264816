#include "absl/status/status.h"
#include "runtime/cuda_monitor.h"

namespace tapeline {

absl::StatusOr<std::unique_ptr<CudaMonitor>> CudaMonitor::start() {
  return absl::FailedPreconditionError(
      "this binary was built without CUDA and cannot watch its calls: build "
      "with --config=cuda");
}

}  // namespace tapeline
