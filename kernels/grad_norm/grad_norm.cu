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

// Tensors of one launch, as a parameter of it, and the first block of each.
struct Table {
  static constexpr int kMost = 128;
  const void* x[kMost];
  int64_t n[kMost];
  int first[kMost + 1];
  int count;

  __device__ int tensor_of(int block) const {
    int low = 0, high = count;  // the last whose first block is not behind it
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (block < first[middle] ? high : low) = middle;
    }
    return low;
  }
};

// term(sum, x) adds an element. A tensor's blocks take its packs in turn and
// leave a partial sum each, so its bits do not depend on the other tensors.
template <class A, class Term>
__global__ void __launch_bounds__(kThreads)
    grad_norm_partials_kernel(Term term, const __grid_constant__ Table table,
                              double* partial) {
  constexpr int kN = Pack<A>::kSize;
  const int t = table.tensor_of(static_cast<int>(blockIdx.x));
  const int block = static_cast<int>(blockIdx.x) - table.first[t];
  const int blocks = table.first[t + 1] - table.first[t];
  const A* const x = static_cast<const A*>(table.x[t]);
  const int64_t n = table.n[t], packs = (n + kN - 1) / kN;
  // Of a pack, all elements side by side: not of the last one, if it is broken.
  const int64_t whole =
      reinterpret_cast<uintptr_t>(x) % sizeof(Pack<A>) == 0 ? n / kN : 0;
  double sum = 0;
  for (int64_t j = int64_t{block} * (kThreads * kPacks) + threadIdx.x;
       j < packs; j += int64_t{blocks} * (kThreads * kPacks)) {
    Pack<A> v[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int64_t at = j + p * kThreads;
      if (at < whole) {
        v[p] = load_pack<true, kN>(x, at, n);
      } else if (at < packs) {
        v[p] = load_pack<false, kN>(x, at, n);
      }
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (j + p * kThreads >= packs) continue;
#pragma unroll
      for (int e = 0; e < kN; ++e) sum = term(sum, v[p].at[e]);
    }
  }
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) partial[t * kNormPartials + block] = sum;
}

// each[t] = the partial sums of tensor t, a block's, in a fixed tree.
__global__ void __launch_bounds__(kThreads)
    grad_norm_sum_kernel(const __grid_constant__ Table table,
                         const double* partial, double* each) {
  const int t = static_cast<int>(blockIdx.x);
  const int count = table.first[t + 1] - table.first[t];
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    sum += partial[t * kNormPartials + i];
  }
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) each[t] = sum;
}

constexpr int kOrderThreads = 1024;
__global__ void __launch_bounds__(kOrderThreads)
    grad_norm_add_kernel(int64_t count, const double* each, double* total) {
  __shared__ double next[kOrderThreads];
  double sum = *total;
  for (int64_t first = 0; first < count; first += kOrderThreads) {
    const int here =
        static_cast<int>(min(int64_t{kOrderThreads}, count - first));
    __syncthreads();  // of the round before
    if (threadIdx.x < here) next[threadIdx.x] = each[first + threadIdx.x];
    __syncthreads();
    if (threadIdx.x != 0) continue;
    for (int i = 0; i < here; ++i) sum += next[i];
  }
  if (threadIdx.x == 0) *total = sum;
}

__global__ void grad_norm_factor_kernel(const double* squares, double max_norm,
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

template <class Term, class A>
void launch_sums(const Launch& l, Term term, const View<const A>* x, int count,
                 double* partial, double* each) {
  Table table{};
  table.count = count;
  for (int t = 0; t < count; ++t) {
    const int64_t n = x[t].elements();
    table.x[t] = x[t].data;
    table.n[t] = n;
    table.first[t + 1] =
        table.first[t] +
        static_cast<int>(std::min<int64_t>(
            ceil_div(n, kThreads * kPacks * Pack<A>::kSize), kNormPartials));
  }
  const auto blocks = static_cast<unsigned>(table.first[count]);
  if (blocks > 0) {
    grad_norm_partials_kernel<A>
        <<<blocks, kThreads, 0, stream_of(l)>>>(term, table, partial);
  }
  grad_norm_sum_kernel<<<static_cast<unsigned>(count), kThreads, 0,
                         stream_of(l)>>>(table, partial, each);
  check_launch("grad_norm");
}

template <class Term, class A>
double sum_for_host(const Launch& l, Term term, const View<const A>& x) {
  const std::lock_guard<std::mutex> hold(scratch_lock);
  void* device = nullptr;
  CHECK(cudaGetSymbolAddress(&device, scratch) == cudaSuccess);
  double* const partial = static_cast<double*>(device);
  double* const total = partial + kNormPartials;
  launch_sums(l, term, &x, 1, partial, total);
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
void squared_norms(Launch l, const std::vector<View<const A>>& x,
                   View<double> partial, View<double> each) {
  const auto count = static_cast<int>(x.size());
  for (int t = 0; t < count; t += Table::kMost) {
    launch_sums(l, Square(), &x[static_cast<size_t>(t)],
                std::min(Table::kMost, count - t),
                partial.data + t * kNormPartials, each.data + t);
  }
}
void add_in_order(Launch l, View<const double> each, View<double> total) {
  grad_norm_add_kernel<<<1, kOrderThreads, 0, stream_of(l)>>>(
      each.elements(), each.data, total.data);
  check_launch("grad_norm");
}
void clip_factor(Launch l, View<const double> squares, double max_norm,
                 View<double> factor) {
  grad_norm_factor_kernel<<<1, 1, 0, stream_of(l)>>>(squares.data, max_norm,
                                                     factor.data);
  check_launch("clip_factor");
}

template double squared_norm(Launch, View<const float>);
template double squared_norm(Launch, View<const double>);
template bool all_finite(Launch, View<const float>);
template bool all_finite(Launch, View<const double>);
template void squared_norms(Launch, const std::vector<View<const float>>&,
                            View<double>, View<double>);
template void squared_norms(Launch, const std::vector<View<const double>>&,
                            View<double>, View<double>);

}  // namespace tapeline::cuda
