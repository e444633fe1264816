// One warp a token: its lanes share the experts.
#include "kernels/cuda.cuh"
#include "kernels/router/router_cuda.h"

namespace tapeline::cuda {
namespace {

// As scores.h has it, which is for host code.
constexpr double kTinyScore = 1e-20;

// The scores of one token's experts; every lane holds the same.
template <class A>
class Scores {
 public:
  __device__ Scores(const A* logit, int experts, RouterOptions::Score score)
      : logit_(logit), softmax_(score == RouterOptions::kSoftmax) {
    if (!softmax_) return;
    const int lane = threadIdx.x;
    A max = logit[0];
    for (int e = lane; e < experts; e += kWarp) {
      max = logit[e] > max ? logit[e] : max;
    }
    max_ = warp_max(max);
    A sum = 0;
    for (int e = lane; e < experts; e += kWarp) sum += exp(logit[e] - max_);
    sum_ = warp_sum(sum);
  }
  __device__ A operator()(int e) const {
    return softmax_ ? exp(logit_[e] - max_) / sum_
                    : A(1) / (A(1) + exp(-logit_[e]));
  }

 private:
  const A* logit_;
  bool softmax_;
  A max_ = 0, sum_ = 1;
};

// Values as whole numbers in their order: 0 is what was taken, NaN 1, then
// -inf.
__device__ unsigned key_of(float x) {
  if (x != x) return 1;
  if (x == 0) return 0x80000000u;
  const unsigned bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ unsigned long long key_of(double x) {
  constexpr unsigned long long kSign = 1ull << 63;
  if (x != x) return 1;
  if (x == 0) return kSign;
  const auto bits = static_cast<unsigned long long>(__double_as_longlong(x));
  return bits & kSign ? ~bits : bits | kSign;
}
template <class A>
using Key = decltype(key_of(A()));

template <class A>
struct Best {
  Key<A> key;
  int index;
};
// The larger of two, ties to the lower index.
template <class A>
__device__ Best<A> better(Best<A> a, Best<A> b) {
  const bool first = a.key > b.key || (a.key == b.key && a.index < b.index);
  return first ? a : b;
}

// Index of the best of n, in every lane; it is taken out.
template <class A>
__device__ int take_best(Key<A>* keys, int n) {
  const int lane = threadIdx.x;
  Best<A> best{0, n};
  for (int i = lane; i < n; i += kWarp) {
    best = better<A>(best, {keys[i], i});
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    best = better<A>(best, {__shfl_xor_sync(~0u, best.key, step),
                            __shfl_xor_sync(~0u, best.index, step)});
  }
  __syncwarp();
  if (lane == 0) keys[best.index] = 0;
  __syncwarp();
  return best.index;
}

// The sum of a group's two largest values; one value stands alone.
template <class A>
__device__ A group_score(const A* value, int size) {
  int first = 0, second = -1;
  for (int e = 1; e < size; ++e) {
    if (key_of(value[e]) > key_of(value[first])) {
      second = first;
      first = e;
    } else if (second < 0 || key_of(value[e]) > key_of(value[second])) {
      second = e;
    }
  }
  return second < 0 ? value[first] : value[first] + value[second];
}

template <class A>
__global__ void __launch_bounds__(kWarp)
    choose(Rows<const A, 2> logits, const A* bias, RouterOptions options,
           Rows<int32_t, 2> ids) {
  __shared__ A choice[kMaxExperts];
  __shared__ Key<A> keys[kMaxExperts];
  __shared__ unsigned kept[kMaxExperts / kWarp];
  const int64_t t = blockIdx.x;
  const int experts = static_cast<int>(logits.size[1]);
  const int lane = threadIdx.x;
  const Scores<A> s(logits.row(t), experts, options.score);
  for (int e = lane; e < experts; e += kWarp) {
    choice[e] = bias == nullptr ? s(e) : s(e) + bias[e];
  }
  __syncwarp();
  if (options.top_groups < options.groups) {
    const int size = experts / options.groups;
    for (int g = lane; g < options.groups; g += kWarp) {
      keys[g] = key_of(group_score(choice + g * size, size));
    }
    kept[lane] = 0;
    __syncwarp();
    for (int i = 0; i < options.top_groups; ++i) {
      const int g = take_best<A>(keys, options.groups);
      if (lane == 0) kept[g / kWarp] |= 1u << g % kWarp;
    }
    __syncwarp();
    // Unchoosable, even where all choice values are negative.
    for (int e = lane; e < experts; e += kWarp) {
      const int g = e / size;
      if (!(kept[g / kWarp] >> g % kWarp & 1)) choice[e] = -INFINITY;
    }
    __syncwarp();
  }
  for (int e = lane; e < experts; e += kWarp) keys[e] = key_of(choice[e]);
  __syncwarp();
  for (int k = 0; k < options.top_k; ++k) {
    const int e = take_best<A>(keys, experts);
    if (lane == 0) ids(t, k) = e;
  }
}

template <class A>
__global__ void __launch_bounds__(kWarp)
    weights(Rows<const A, 2> logits, Rows<const int32_t, 2> ids,
            RouterOptions options, Rows<A, 2> weight) {
  __shared__ A chosen[kMaxChoices];
  const int64_t t = blockIdx.x;
  const int lane = threadIdx.x, top_k = options.top_k;
  const Scores<A> s(logits.row(t), static_cast<int>(logits.size[1]),
                    options.score);
  for (int k = lane; k < top_k; k += kWarp) {
    const int32_t e = ids(t, k);
    chosen[k] = e < 0 ? A(0) : s(e);
  }
  __syncwarp();
  A z = 0;
  for (int k = 0; k < top_k; ++k) z += chosen[k];
  const A divisor = options.normalize ? z + A(kTinyScore) : A(1);
  for (int k = lane; k < top_k; k += kWarp) {
    weight(t, k) = chosen[k] / divisor * A(options.scale);
  }
}

template <class A>
__global__ void __launch_bounds__(kWarp)
    weights_backward(Rows<const A, 2> dweight, Rows<const A, 2> logits,
                     Rows<const int32_t, 2> ids, RouterOptions options,
                     Rows<A, 2> dlogits) {
  __shared__ A chosen[kMaxChoices], ds[kMaxChoices];
  __shared__ int32_t id[kMaxChoices];
  const int64_t t = blockIdx.x;
  const int lane = threadIdx.x, top_k = options.top_k;
  const int experts = static_cast<int>(logits.size[1]);
  const bool softmax = options.score == RouterOptions::kSoftmax;
  const Scores<A> s(logits.row(t), experts, options.score);
  for (int k = lane; k < top_k; k += kWarp) {
    id[k] = ids(t, k);
    chosen[k] = id[k] < 0 ? A(0) : s(id[k]);
    ds[k] = A(options.scale) * dweight(t, k);
  }
  __syncwarp();
  A z = A(kTinyScore), gs = 0;
  for (int k = 0; k < top_k; ++k) {
    z += chosen[k];
    if (id[k] >= 0) gs += ds[k] * chosen[k];
  }
  __syncwarp();
  if (options.normalize) {
    for (int k = lane; k < top_k; k += kWarp) ds[k] = (ds[k] - gs / z) / z;
  }
  __syncwarp();
  A sum = 0;  // of ds_j s_j: softmax's common part
  for (int k = 0; softmax && k < top_k; ++k) {
    if (id[k] >= 0) sum += ds[k] * chosen[k];
  }
  for (int e = lane; e < experts; e += kWarp) {
    A out = softmax ? s(e) * -sum : A(0);
    for (int k = 0; k < top_k; ++k) {
      if (id[k] != e) continue;
      const A slope = softmax ? chosen[k] : chosen[k] * (1 - chosen[k]);
      out += slope * ds[k];
    }
    dlogits(t, e) = out;
  }
}

}  // namespace

template <class A>
void router_choose(Launch l, View<const A> logits_TE, View<const A> bias_E,
                   const RouterOptions& options, View<int32_t> ids_TK) {
  const auto blocks = static_cast<unsigned>(logits_TE.size(0));
  if (blocks == 0) return;
  choose<A><<<blocks, kWarp, 0, stream_of(l)>>>(rows<2>(logits_TE), bias_E.data,
                                                options, rows<2>(ids_TK));
  check_launch("router_choose");
}

template <class A>
void router_weights(Launch l, View<const A> logits_TE,
                    View<const int32_t> ids_TK, const RouterOptions& options,
                    View<A> weight_TK) {
  const auto blocks = static_cast<unsigned>(logits_TE.size(0));
  if (blocks == 0) return;
  weights<A><<<blocks, kWarp, 0, stream_of(l)>>>(
      rows<2>(logits_TE), rows<2>(ids_TK), options, rows<2>(weight_TK));
  check_launch("router_weights");
}

template <class A>
void router_weights_backward(Launch l, View<const A> dweight_TK,
                             View<const A> logits_TE,
                             View<const int32_t> ids_TK,
                             const RouterOptions& options, View<A> dlogits_TE) {
  const auto blocks = static_cast<unsigned>(logits_TE.size(0));
  if (blocks == 0) return;
  weights_backward<A><<<blocks, kWarp, 0, stream_of(l)>>>(
      rows<2>(dweight_TK), rows<2>(logits_TE), rows<2>(ids_TK), options,
      rows<2>(dlogits_TE));
  check_launch("router_weights_backward");
}

#define TAPELINE_ROUTER(A)                                                    \
  template void router_choose(Launch, View<const A>, View<const A>,           \
                              const RouterOptions&, View<int32_t>);           \
  template void router_weights(Launch, View<const A>, View<const int32_t>,    \
                               const RouterOptions&, View<A>);                \
  template void router_weights_backward(Launch, View<const A>, View<const A>, \
                                        View<const int32_t>,                  \
                                        const RouterOptions&, View<A>);
TAPELINE_ROUTER(float)
TAPELINE_ROUTER(double)
#undef TAPELINE_ROUTER

}  // namespace tapeline::cuda
