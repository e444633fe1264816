#include <algorithm>

#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/cross_entropy/cross_entropy_cuda.h"
#include "kernels/cuda_rows.cuh"

namespace tapeline::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kPacks = 4;  // whose loads are in flight together

// exp of what is at most about 0. The fast instruction's error of 2^-21 (it
// grows with the argument, where the result is small) vanishes in bf16 logits.
template <class T>
__device__ Accumulator<T> exp_of(Accumulator<T> x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return __expf(x);
  } else {
    return exp(x);
  }
}

// sum exp(x - reference), and the maximum it refers to. Starts from nothing.
template <class T>
struct ExpSum {
  using A = Accumulator<T>;
  A max = A(-INFINITY), sum = 0;

  // While all is -inf there is nothing to subtract: exp(-inf - 0) is 0, but
  // -inf - -inf would be NaN. NaNs among the logits reach the sum.
  __device__ static A reference(A max) { return max == A(-INFINITY) ? 0 : max; }

  template <int kN>
  __device__ void add(const Pack<T, kN>& v, int64_t first, int64_t n) {
    A top = max;
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      if (first + e < n) top = fmax(top, A(load(v.at[e])));
    }
    const A from = reference(top);
    if (top > max) {
      sum *= exp_of<T>(max - from);
      max = top;
    }
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      if (first + e < n) sum += exp_of<T>(load(v.at[e]) - from);
    }
  }
  __device__ void join(A other_max, A other_sum) {
    const A top = fmax(max, other_max), from = reference(top);
    sum = sum * exp_of<T>(max - from) + other_sum * exp_of<T>(other_max - from);
    max = top;
  }
};

// One block a token, one pass: partial sums follow their own maximum.
template <bool kWhole, class T>
__global__ void __launch_bounds__(kThreads)
    forward(Rows<const T, 2> logits, Rows<const int32_t, 1> labels,
            Rows<Accumulator<T>, 1> loss, Rows<Accumulator<T>, 1> lse) {
  using A = Accumulator<T>;
  constexpr int kN = Pack<T>::kSize, kWarps = kThreads / kWarp;
  const int64_t t = blockIdx.x, n = logits.size[1];
  const int64_t packs = (n + kN - 1) / kN;
  const int32_t label = labels(t);
  if (label == kIgnoredLabel) {
    if (threadIdx.x == 0) loss(t) = lse(t) = 0;
    return;
  }
  const T* x = logits.row(t);
  ExpSum<T> own;
  // Without a condition on each, the loads of a thread go out together.
  int64_t j = threadIdx.x;
  for (; j + (kPacks - 1) * kThreads < packs; j += kThreads * kPacks) {
    Pack<T> v[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      v[p] = load_pack_once<kWhole, kN>(x, j + p * kThreads, n);
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      own.add(v[p], kWhole ? 0 : (j + p * kThreads) * kN, kWhole ? kN : n);
    }
  }
  for (; j < packs; j += kThreads) {
    own.add(load_pack_once<kWhole, kN>(x, j, n), kWhole ? 0 : j * kN,
            kWhole ? kN : n);
  }
  // Lanes with their neighbours, then warps in order.
  for (int step = 1; step < kWarp; step *= 2) {
    const A max = __shfl_xor_sync(~0u, own.max, step);
    const A sum = __shfl_xor_sync(~0u, own.sum, step);
    own.join(max, sum);
  }
  __shared__ A maxima[kWarps], sums[kWarps];
  if (threadIdx.x % kWarp == 0) {
    maxima[threadIdx.x / kWarp] = own.max;
    sums[threadIdx.x / kWarp] = own.sum;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) own.join(maxima[w], sums[w]);
  // An infinite maximum is the answer itself.
  const A z = isinf(own.max) ? own.max : own.max + log(own.sum);
  lse(t) = z;
  loss(t) = z - load(x[label]);
}

template <bool kWhole, class T>
__global__ void __launch_bounds__(kThreads)
    backward(Rows<T, 2> logits, Rows<const int32_t, 1> labels,
             Rows<const Accumulator<T>, 1> lse,
             Rows<const Accumulator<T>, 1> weight) {
  using A = Accumulator<T>;
  constexpr int kN = Pack<T>::kSize;
  const int64_t t = blockIdx.x, n = logits.size[1];
  const int64_t packs = (n + kN - 1) / kN;
  T* x = logits.row(t);
  const int32_t label = labels(t);
  const A w = label == kIgnoredLabel ? A(0) : weight(t);
  if (w == 0) {
    for (int64_t j = threadIdx.x; j < packs; j += kThreads) {
      store_pack<kWhole>(x, j, n, Pack<T>{});
    }
    return;
  }
  const A z = lse(t);
  for (int64_t j = threadIdx.x; j < packs; j += kThreads * kPacks) {
    Pack<T> v[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int64_t at = j + p * kThreads;
      if (at < packs) v[p] = load_pack<kWhole, kN>(x, at, n);
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int64_t at = j + p * kThreads;
      if (at >= packs) continue;
      Pack<T> d;
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        A probability = exp_of<T>(load(v[p].at[e]) - z);
        if (at * kN + e == label) probability -= 1;
        store(d.at[e], w * probability);
      }
      store_pack<kWhole>(x, at, n, d);
    }
  }
}

// The factor is nearly always 1: then no block does more than read it.
template <bool kWhole, class T>
__global__ void __launch_bounds__(kThreads)
    scale(Rows<T, 2> dlogits, const Accumulator<T>* factor) {
  constexpr int kN = Pack<T>::kSize;
  const Accumulator<T> by = *factor;
  if (by == 1) return;
  const int64_t n = dlogits.size[1], packs = (n + kN - 1) / kN;
  for (int64_t t = blockIdx.x; t < dlogits.size[0]; t += gridDim.x) {
    T* x = dlogits.row(t);
    for (int64_t j = threadIdx.x; j < packs; j += kThreads) {
      Pack<T> v = load_pack<kWhole, kN>(x, j, n);
#pragma unroll
      for (int e = 0; e < kN; ++e) store(v.at[e], by * load(v.at[e]));
      store_pack<kWhole>(x, j, n, v);
    }
  }
}
constexpr int64_t kScaleBlocks = 528;  // four for each of an H200's processors

}  // namespace

template <class T>
void cross_entropy_forward(Launch l, View<const T> logits,
                           View<const int32_t> labels,
                           View<Accumulator<T>> loss,
                           View<Accumulator<T>> lse) {
  const auto blocks = static_cast<unsigned>(logits.size(0));
  if (blocks == 0) return;
  const auto run = [&]<bool kWhole>() {
    forward<kWhole, T><<<blocks, kThreads, 0, stream_of(l)>>>(
        rows<2>(logits), rows<1>(labels), rows<1>(loss), rows<1>(lse));
  };
  by_alignment(run, logits);
  check_launch("cross_entropy_forward");
}

template <class T>
void cross_entropy_backward(Launch l, View<T> logits,
                            View<const int32_t> labels,
                            View<const Accumulator<T>> lse,
                            View<const Accumulator<T>> weight) {
  const auto blocks = static_cast<unsigned>(logits.size(0));
  if (blocks == 0) return;
  const auto run = [&]<bool kWhole>() {
    backward<kWhole, T><<<blocks, kThreads, 0, stream_of(l)>>>(
        rows<2>(logits), rows<1>(labels), rows<1>(lse), rows<1>(weight));
  };
  by_alignment(run, View<const T>(logits));
  check_launch("cross_entropy_backward");
}

template <class T>
void cross_entropy_forward_backward(Launch l, View<T> logits,
                                    View<const int32_t> labels,
                                    View<const Accumulator<T>> weight,
                                    View<Accumulator<T>> loss,
                                    View<Accumulator<T>> lse) {
  cuda::cross_entropy_forward<T>(l, logits, labels, loss, lse);
  cuda::cross_entropy_backward<T>(l, logits, labels, lse, weight);
}

template <class T>
void cross_entropy_scale(Launch l, View<T> dlogits,
                         View<const Accumulator<T>> factor) {
  const auto blocks =
      static_cast<unsigned>(std::min(dlogits.size(0), kScaleBlocks));
  if (blocks == 0) return;
  const auto run = [&]<bool kWhole>() {
    scale<kWhole, T>
        <<<blocks, kThreads, 0, stream_of(l)>>>(rows<2>(dlogits), factor.data);
  };
  by_alignment(run, View<const T>(dlogits));
  check_launch("cross_entropy_scale");
}

#define INSTANTIATE(T)                                                       \
  template void cross_entropy_forward(                                       \
      Launch, View<const T>, View<const int32_t>, View<Accumulator<T>>,      \
      View<Accumulator<T>>);                                                 \
  template void cross_entropy_backward(Launch, View<T>, View<const int32_t>, \
                                       View<const Accumulator<T>>,           \
                                       View<const Accumulator<T>>);          \
  template void cross_entropy_forward_backward(                              \
      Launch, View<T>, View<const int32_t>, View<const Accumulator<T>>,      \
      View<Accumulator<T>>, View<Accumulator<T>>);                           \
  template void cross_entropy_scale(Launch, View<T>, View<const Accumulator<T>>)
INSTANTIATE(float);
INSTANTIATE(bf16);
INSTANTIATE(double);
#undef INSTANTIATE

}  // namespace tapeline::cuda
