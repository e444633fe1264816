#include <algorithm>
#include <mutex>

#include "kernels/cuda_rows.cuh"
#include "kernels/grad_norm/grad_norm.h"
#include "kernels/grad_norm/grad_norm_cuda.h"

namespace tapeline::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPacks = 4;  // whose loads are in flight together

// What squared_norm() and all_finite() leave for the host; the last element is
// the answer. They wait for it, so one buffer, locked, is enough.
__device__ double scratch[kNormPartials + 1];
std::mutex scratch_lock;

// term(sum, x) adds an element. Blocks take packs in turn.
template <bool kWhole, class Term, class A>
__global__ void __launch_bounds__(kThreads)
    sum_partials(Term term, int64_t n, const A* x, double* partial) {
  constexpr int kN = Pack<A>::kSize;
  const int64_t packs = (n + kN - 1) / kN;
  double sum = 0;
  for (int64_t j = int64_t{blockIdx.x} * (kThreads * kPacks) + threadIdx.x;
       j < packs; j += int64_t{gridDim.x} * (kThreads * kPacks)) {
    Pack<A> v[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int64_t at = j + p * kThreads;
      if (at < packs) v[p] = load_pack<kWhole, kN>(x, at, n);
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (j + p * kThreads >= packs) continue;
#pragma unroll
      for (int e = 0; e < kN; ++e) sum = term(sum, v[p].at[e]);
    }
  }
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// total = partials in a fixed tree, added to what it was or instead of it.
template <bool kAdd>
__global__ void __launch_bounds__(kThreads)
    sum_up(const double* partial, int count, double* total) {
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) sum += partial[i];
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) *total = kAdd ? *total + sum : sum;
}

__global__ void make_factor(const double* squares, double max_norm,
                            double* factor) {
  const double norm = sqrt(*squares);
  if (!isfinite(norm)) {
    *factor = NAN;
  } else {
    *factor = max_norm > 0 ? fmin(1.0, max_norm / (norm + kClipEps)) : 1.0;
  }
}

struct Square {
  template <class A>
  __device__ double operator()(double sum, A x) const {
    return fma(static_cast<double>(x), static_cast<double>(x), sum);
  }
};
// x - x is 0 for a finite x and NaN otherwise, and a sum keeps NaN.
struct NotFinite {
  template <class A>
  __device__ double operator()(double sum, A x) const {
    return sum + static_cast<double>(x - x);
  }
};

template <bool kAdd, class Term, class A>
void launch_sum(const Launch& l, Term term, const View<const A>& x,
                double* partial, double* total) {
  const int64_t n = x.elements();
  const auto blocks = static_cast<int>(std::min<int64_t>(
      ceil_div(n, kThreads * kPacks * Pack<A>::kSize), kNormPartials));
  const auto run = [&]<bool kWhole>() {
    sum_partials<kWhole>
        <<<blocks, kThreads, 0, stream_of(l)>>>(term, n, x.data, partial);
  };
  if (blocks > 0) by_alignment(run, View<const A>(x.data, Shape{n}));
  sum_up<kAdd><<<1, kThreads, 0, stream_of(l)>>>(partial, blocks, total);
  check_launch("grad_norm");
}

template <class Term, class A>
double sum_for_host(const Launch& l, Term term, const View<const A>& x) {
  const std::lock_guard<std::mutex> hold(scratch_lock);
  void* device = nullptr;
  CHECK(cudaGetSymbolAddress(&device, scratch) == cudaSuccess);
  double* const partial = static_cast<double*>(device);
  double* const total = partial + kNormPartials;
  launch_sum<false>(l, term, x, partial, total);
  double out = 0;
  CHECK(cudaMemcpyAsync(&out, total, sizeof out, cudaMemcpyDeviceToHost,
                        stream_of(l)) == cudaSuccess);
  const cudaError_t error = cudaStreamSynchronize(stream_of(l));
  CHECK(error == cudaSuccess) << "[grad_norm] " << cudaGetErrorString(error);
  return out;
}

}  // namespace

template <class A>
double squared_norm(Launch l, View<const A> x) {
  return sum_for_host(l, Square(), x);
}
template <class A>
bool all_finite(Launch l, View<const A> x) {
  return sum_for_host(l, NotFinite(), x) == 0;
}
template <class A>
void add_squared_norm(Launch l, View<const A> x, View<double> partial,
                      View<double> total) {
  launch_sum<true>(l, Square(), x, partial.data, total.data);
}
void clip_factor(Launch l, View<const double> squares, double max_norm,
                 View<double> factor) {
  make_factor<<<1, 1, 0, stream_of(l)>>>(squares.data, max_norm, factor.data);
  check_launch("clip_factor");
}

template double squared_norm(Launch, View<const float>);
template double squared_norm(Launch, View<const double>);
template bool all_finite(Launch, View<const float>);
template bool all_finite(Launch, View<const double>);
template void add_squared_norm(Launch, View<const float>, View<double>,
                               View<double>);
template void add_squared_norm(Launch, View<const double>, View<double>,
                               View<double>);

}  // namespace tapeline::cuda
