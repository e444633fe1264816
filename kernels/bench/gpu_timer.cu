#include <cuda_profiler_api.h>

#include "kernels/bench/gpu_timer.h"
#include "kernels/cuda.cuh"

namespace tapeline::cuda {
namespace {

void check(cudaError_t error) {
  CHECK(error == cudaSuccess) << "[bench] " << cudaGetErrorString(error);
}

__global__ void occupy(uint64_t nanoseconds) {
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

}  // namespace

double time_on_gpu(Launch l, double busy, const std::function<void()>& queue) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  if (busy > 0) {
    occupy<<<1, 1, 0, stream_of(l)>>>(static_cast<uint64_t>(busy * 1e9));
    check_launch("occupy");
  }
  check(cudaEventRecord(begin, stream_of(l)));
  queue();
  check(cudaEventRecord(end, stream_of(l)));
  check(cudaEventSynchronize(end));
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin, end));
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  return milliseconds * 1e-3;
}

void profile_from_here() {
  check(cudaDeviceSynchronize());
  check(cudaProfilerStart());
}
void profile_to_here() {
  check(cudaDeviceSynchronize());
  check(cudaProfilerStop());
}

}  // namespace tapeline::cuda
