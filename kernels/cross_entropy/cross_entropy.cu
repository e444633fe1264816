#include <algorithm>

#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/cross_entropy/cross_entropy_cuda.h"
#include "kernels/cross_entropy/cross_entropy_sum.cuh"

namespace tapeline::cuda {
namespace {

using namespace ce_detail;

constexpr int kThreads = 512;
constexpr int kPacks = 4;  // whose loads are in flight together

// One block a token, one pass: partial sums follow their own maximum. A thread
// has those that threads of a cluster's blocks have at its place.
template <bool kWhole, class T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_forward_kernel(Rows<const T, 2> logits,
                                 Rows<const int32_t, 1> labels,
                                 Rows<Accumulator<T>, 1> loss,
                                 Rows<Accumulator<T>, 1> lse) {
  using A = Accumulator<T>;
  constexpr int kN = Pack<T>::kSize, kSums = kRowThreads / kThreads;
  static_assert(kPacks % kSums == 0);
  const int64_t t = blockIdx.x, n = logits.size[1];
  const int64_t packs = (n + kN - 1) / kN;
  const int32_t label = labels(t);
  if (label == kIgnoredLabel) {
    if (threadIdx.x == 0) loss(t) = lse(t) = 0;
    return;
  }
  const T* x = logits.row(t);
  ExpSum<T> own[kSums];
  const auto add = [&](int p, const Pack<T>& v, int64_t at) {
    own[p % kSums].add(v, kWhole ? 0 : at * kN, kWhole ? kN : n);
  };
  // Without a condition on each, the loads of a thread go out together.
  int64_t j = threadIdx.x;
  for (; j + (kPacks - 1) * kThreads < packs; j += kThreads * kPacks) {
    Pack<T> v[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      v[p] = load_pack_once<kWhole, kN>(x, j + p * kThreads, n);
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) add(p, v[p], j + p * kThreads);
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t at = j + p * kThreads;
    if (at < packs) add(p, load_pack_once<kWhole, kN>(x, at, n), at);
  }
  struct Part {
    A x, y;
  };
  __shared__ Part parts[kRowWarps];
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    own[i].join_warp();
    if (threadIdx.x % kWarp == 0) {
      parts[(i * kThreads + threadIdx.x) / kWarp] = {own[i].max, own[i].sum};
    }
  }
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  const ExpSum<T> row = join_row<T>([&](int i) { return parts[i]; });
  if (threadIdx.x != 0) return;
  lse(t) = row.lse();
  loss(t) = row.lse() - load(x[label]);
}

template <bool kWhole, class T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_backward_kernel(Rows<T, 2> logits,
                                  Rows<const int32_t, 1> labels,
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
      store_pack<kWhole>(
          x, at, n, gradient(v[p], static_cast<int>(label - at * kN), z, w));
    }
  }
}

// The factor is nearly always 1: then no block does more than read it.
template <bool kWhole, class T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_scale_kernel(Rows<T, 2> dlogits,
                               const Accumulator<T>* factor) {
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
    cross_entropy_forward_kernel<kWhole, T>
        <<<blocks, kThreads, 0, stream_of(l)>>>(
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
    cross_entropy_backward_kernel<kWhole, T>
        <<<blocks, kThreads, 0, stream_of(l)>>>(
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
  if constexpr (std::is_same_v<T, bf16>) {
    if (logits.size(0) == 0) return;
    const bool whole = packable(View<const T>(logits));
    if (cross_entropy_plan(true, whole, logits.size(1)).packs > 0) {
      return cross_entropy_clusters(l, logits, labels, weight, loss, lse);
    }
  }
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
    cross_entropy_scale_kernel<kWhole, T>
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
