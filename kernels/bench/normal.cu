#include <algorithm>

#include "kernels/bench/normal.h"
#include "kernels/bench/normal_cuda.h"
#include "kernels/cuda.cuh"

namespace tapeline::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void fill_normal_kernel(T* out, int64_t n, uint64_t key) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       i < n; i += step) {
    const bench::Uniforms u = bench::uniforms_at(key, static_cast<uint64_t>(i));
    bf16 rounded;
    store(rounded, sqrtf(-2 * __logf(u.a)) * __cosf(6.2831853f * u.b));
    out[i] = T(load(rounded));
  }
}

}  // namespace

template <class T>
void fill_normal(Launch l, uint64_t key, View<T> out) {
  const int64_t n = out.elements();
  if (n == 0) return;
  const int64_t blocks = std::min<int64_t>(ceil_div(n, kThreads), 4096);
  fill_normal_kernel<<<static_cast<unsigned>(blocks), kThreads, 0,
                       stream_of(l)>>>(out.data, n, key);
  check_launch("fill_normal");
}
template void fill_normal(Launch, uint64_t, View<float>);
template void fill_normal(Launch, uint64_t, View<bf16>);
template void fill_normal(Launch, uint64_t, View<double>);

}  // namespace tapeline::cuda
