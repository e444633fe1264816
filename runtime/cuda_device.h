// CUDA devices. Without --config=cuda there is none, and asking for one is an
// error that says so.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "runtime/device.h"

namespace tapeline {

// How many this process can use; 0 without a driver.
int cuda_devices();

// A device with streams, memory and pinned memory of GPU `index`. `threads` are
// for what stays on the host. Synchronous copies and kernels for debugging:
// CUDA_LAUNCH_BLOCKING=1 in the environment.
absl::StatusOr<std::unique_ptr<Device>> make_cuda_device(int index = 0,
                                                         int threads = 1);

// Pinned host memory from the driver, for a pool of one's own; nothing without
// CUDA.
SystemMemory cuda_pinned_memory();

struct CudaProperties {
  std::string name, uuid;  // NVIDIA H200, GPU-4f2a...
  int driver = 0;          // the CUDA it serves: 13000 is 13.0
  size_t memory = 0;       // bytes
};
absl::StatusOr<CudaProperties> cuda_properties(int index = 0);

}  // namespace tapeline
