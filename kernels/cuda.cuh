// What .cu files share: views in device code, reductions in a fixed order,
// wide loads and stores, and launches that are checked.
//
// A kernel is launched on the stream of its Launch and never synchronizes. Sums
// follow a fixed tree that depends on shapes alone, so results are the same
// bits from run to run. No atomics on floats.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/kernel.h"

namespace tapeline::cuda {

inline cudaStream_t stream_of(const Launch& l) {
  return static_cast<cudaStream_t>(l.stream->native());
}

// After every <<<>>>: a launch that was refused is an error of the program.
inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  CHECK(error == cudaSuccess) << "[" << op << "] " << cudaGetErrorString(error);
}

// A view with N dimensions that device code can index.
template <class T, int N>
struct Rows {
  T* data;
  int64_t size[N];
  int64_t stride[N];

  __device__ T& operator()(int64_t i) const requires(N == 1) {
    return data[i * stride[0]];
  }
  __device__ T& operator()(int64_t i, int64_t j) const requires(N == 2) {
    return data[i * stride[0] + j * stride[1]];
  }
  __device__ T& operator()(int64_t i, int64_t j, int64_t k) const
      requires(N == 3) {
    return data[i * stride[0] + j * stride[1] + k * stride[2]];
  }
  // The start of row i of the first dimension.
  __device__ T* row(int64_t i) const { return data + i * stride[0]; }
};

template <int N, class T>
Rows<T, N> rows(const View<T>& x) {
  CHECK_EQ(x.rank(), N);
  Rows<T, N> out{x.data, {}, {}};
  for (int i = 0; i < N; ++i) {
    out.size[i] = x.size(i);
    out.stride[i] = x.strides[i];
  }
  return out;
}

// Elements in and out of arithmetic, as kernels/element.h has them.
__device__ inline float load(float x) { return x; }
__device__ inline double load(double x) { return x; }
__device__ inline float load(bf16 x) { return x; }
__device__ inline void store(float& to, float value) { to = value; }
__device__ inline void store(double& to, double value) { to = value; }
__device__ inline void store(bf16& to, float value) {
  const __nv_bfloat16 rounded = __float2bfloat16_rn(value);
  to.bits = __bfloat16_as_ushort(rounded);
}

// kSize elements in one access, 16 bytes by default.
template <class T, int kElements = 16 / sizeof(T)>
struct alignas(kElements * sizeof(T)) Pack {
  static constexpr int kSize = kElements;
  T at[kSize];
};
// Whether rows of `size` elements can be walked in packs: every row starts on
// 16 bytes and its length is a multiple of a pack.
template <class T>
bool packable(const View<T>& x) {
  if (reinterpret_cast<uintptr_t>(x.data) % 16 != 0) return false;
  if (x.size(-1) % Pack<T>::kSize != 0 || x.strides[-1] != 1) return false;
  for (int i = 0; i + 1 < x.rank(); ++i) {
    if (x.size(i) > 1 && x.strides[i] % Pack<T>::kSize != 0) return false;
  }
  return true;
}

constexpr int kWarp = 32;

// The sum (or what `op` makes) over a warp, in every lane, by a butterfly.
template <class A, class Op>
__device__ A warp_reduce(A value, Op op) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = op(value, __shfl_xor_sync(~0u, value, step));
  }
  return value;
}
template <class A>
__device__ A warp_sum(A value) {
  return warp_reduce(value, [](A a, A b) { return a + b; });
}
template <class A>
__device__ A warp_max(A value) {
  return warp_reduce(value, [](A a, A b) { return a > b ? a : b; });
}

// The same over a block of kThreads, in every thread; kThreads is a multiple of
// the warp. May be called again at once.
template <int kThreads, class A, class Op>
__device__ A block_reduce(A value, A identity, Op op) {
  static_assert(kThreads % kWarp == 0);
  constexpr int kWarps = kThreads / kWarp;
  value = warp_reduce(value, op);
  if constexpr (kWarps == 1) return value;
  __shared__ A parts[kWarps];
  __syncthreads();  // of a call before this one
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = value;
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  return warp_reduce(lane < kWarps ? parts[lane] : identity, op);
}
template <int kThreads, class A>
__device__ A block_sum(A value) {
  return block_reduce<kThreads>(value, A(0), [](A a, A b) { return a + b; });
}

}  // namespace tapeline::cuda
