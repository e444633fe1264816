#include "runtime/cuda_device.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "runtime/cuda_check.h"
#include "runtime/cuda_stream.h"

namespace tapeline {
namespace {

// Null where there is no memory: that error is not sticky, and is taken off.
template <class Allocate>
void* or_null(Allocate allocate) {
  void* data = nullptr;
  const cudaError_t error = allocate(&data);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  CUDA_CHECK(error);
  return data;
}

absl::Status missing(int index, cudaError_t error) {
  return absl::FailedPreconditionError(
      absl::StrCat("no CUDA device ", index, ": ", cudaGetErrorString(error),
                   "; see nvidia-smi, or choose device = \"cpu\""));
}

// Streams that share one of a GPU's queues wait for each other's work, which
// for messages that wait for another process can be for ever. There are 8
// queues unless more are asked for before the driver starts, and 32 at most.
void separate_streams() {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*replace=*/0);
}

}  // namespace

int cuda_devices() {
  separate_streams();
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

absl::StatusOr<std::unique_ptr<Device>> make_cuda_device(int index,
                                                         int threads) {
  separate_streams();
  cudaError_t error = cudaSetDevice(index);
  if (error == cudaSuccess) error = cudaFree(nullptr);  // makes the context
  if (error != cudaSuccess) {
    cudaGetLastError();
    return missing(index, error);
  }
  DeviceStreams streams;
  streams.compute = std::make_unique<CudaStream>("compute");
  streams.copy_out = std::make_unique<CudaStream>("copy_out");
  streams.copy_in = std::make_unique<CudaStream>("copy_in");
  DeviceBackend backend;
  backend.kind = DeviceKind::kCuda;
  backend.memory.allocate = [](size_t bytes) {
    return or_null([&](void** data) { return cudaMalloc(data, bytes); });
  };
  backend.memory.free = [](void* data) { CUDA_CHECK(cudaFree(data)); };
  backend.memory.device_only = true;
  backend.pinned = cuda_pinned_memory();
  backend.enter = [index] { CUDA_CHECK(cudaSetDevice(index)); };
  return std::make_unique<Device>(threads, std::move(streams), /*dry=*/false,
                                  backend);
}

SystemMemory cuda_pinned_memory() {
  SystemMemory memory;
  memory.allocate = [](size_t bytes) {
    return or_null([&](void** data) {
      return cudaHostAlloc(data, bytes, cudaHostAllocDefault);
    });
  };
  memory.free = [](void* data) { CUDA_CHECK(cudaFreeHost(data)); };
  return memory;
}

absl::StatusOr<CudaProperties> cuda_properties(int index) {
  cudaDeviceProp found;
  const cudaError_t error = cudaGetDeviceProperties(&found, index);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return missing(index, error);
  }
  CudaProperties out;
  out.name = found.name;
  out.memory = found.totalGlobalMem;
  CUDA_CHECK(cudaDriverGetVersion(&out.driver));
  // As nvidia-smi prints it.
  out.uuid = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) out.uuid += "-";
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x",
                  static_cast<unsigned char>(found.uuid.bytes[i]));
    out.uuid += digits;
  }
  return out;
}

}  // namespace tapeline
