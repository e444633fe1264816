#include <cuda_runtime.h>

#include <atomic>
#include <thread>

#include "kernels/cuda.cuh"
#include "runtime/access.h"
#include "runtime/check.h"
#include "tests/gpu/busy.h"

namespace tapeline {
namespace {

constexpr int kThreads = 256;

void check(cudaError_t error) {
  CHECK(error == cudaSuccess) << cudaGetErrorString(error);
}

// Some sums, then a value in and out of memory; `rounds` times.
__global__ void __launch_bounds__(kThreads)
    work(float* memory, int64_t elements, int rounds) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (int r = 0; r < rounds; ++r, at = (at + step) % elements) {
    float x = memory[at];
    for (int i = 0; i < 64; ++i) x = fmaf(x, 0.999f, 0.001f);
    memory[at] = x;
  }
}

__global__ void __launch_bounds__(kThreads)
    count_differences(const uint8_t* a, const uint8_t* b, int64_t bytes,
                      unsigned long long* count) {
  unsigned long long mine = 0;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < bytes;
       i += int64_t{gridDim.x} * kThreads) {
    mine += a[i] != b[i] ? 1 : 0;
  }
  if (mine > 0) atomicAdd(count, mine);
}

}  // namespace

struct BusyGpu::State {
  std::atomic<bool> stop = false;
  std::atomic<int64_t> runs = 0;
  std::thread thread;
};

BusyGpu::BusyGpu() : state_(std::make_unique<State>()) {
  state_->thread = std::thread([&state = *state_] {
    constexpr int64_t kElements = int64_t{64} << 20;
    cudaStream_t stream;
    float* memory;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    check(cudaMalloc(&memory, kElements * sizeof(float)));
    check(cudaMemsetAsync(memory, 0, kElements * sizeof(float), stream));
    for (unsigned i = 0; !state.stop; ++i) {
      // One to four blocks on a processor, for up to a millisecond.
      work<<<132 * (1 + i % 4), kThreads, 0, stream>>>(
          memory, kElements, static_cast<int>(200 + i * 7919 % 1500));
      check(cudaGetLastError());
      check(cudaStreamSynchronize(stream));
      ++state.runs;
    }
    check(cudaFree(memory));
    check(cudaStreamDestroy(stream));
  });
}
BusyGpu::~BusyGpu() {
  state_->stop = true;
  state_->thread.join();
}
int64_t BusyGpu::runs() const { return state_->runs; }

int64_t differing_bytes(const Tensor& a, const Tensor& b) {
  CHECK(a.contiguous() && b.contiguous() && a.dtype() == b.dtype() &&
        a.shape() == b.shape());
  const Tensor count = Tensor::zeros({1}, DType::kI64);
  if (a.bytes() == 0) return 0;
  Stream& stream = Device::current().compute();
  const auto bytes_of = [&](const Tensor& x, bool write) {
    return x.storage()->acquire(stream, write) +
           x.offset() * static_cast<int64_t>(size_of(x.dtype()));
  };
  const auto* const x = reinterpret_cast<const uint8_t*>(bytes_of(a, false));
  const auto* const y = reinterpret_cast<const uint8_t*>(bytes_of(b, false));
  count_differences<<<1056, kThreads, 0, cuda::stream_of(launch())>>>(
      x, y, a.bytes(),
      reinterpret_cast<unsigned long long*>(bytes_of(count, true)));
  check(cudaGetLastError());
  a.storage()->release(stream, false);
  b.storage()->release(stream, false);
  count.storage()->release(stream, true);
  return count.to_vector<int64_t>()[0];
}

}  // namespace tapeline
