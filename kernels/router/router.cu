// One warp a token: its lanes share the experts.
#include <bit>

#include "kernels/cuda_rows.cuh"
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
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
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
    router_choose_kernel(Rows<const A, 2> logits, const A* bias,
                         RouterOptions options, Rows<int32_t, 2> ids) {
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

// The same choice in f32 with all of a token's experts in registers: a lane has
// kEach neighbouring ones, and a group is one lane's, or that of a power of two
// of neighbouring lanes. Arithmetic and order of comparisons are those above,
// but for the order of softmax's sum.
constexpr int kChooseThreads = 128;

__device__ float value_of(unsigned key) {
  if (key <= 1) return NAN;
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

template <bool kWhole, int kEach>
__global__ void __launch_bounds__(kChooseThreads)
    router_choose_held_kernel(Rows<const float, 2> logits, const float* bias,
                              RouterOptions options, int lanes_per_group,
                              Rows<int32_t, 2> ids) {
  constexpr int kWarps = kChooseThreads / kWarp, kN = 4;
  const int64_t t = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (t >= logits.size[0]) return;  // a warp as a whole
  const int experts = static_cast<int>(logits.size[1]);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int first = lane * kEach;
  float s[kEach];
  const auto read = [&](const float* from, float(&to)[kEach]) {
#pragma unroll
    for (int p = 0; p < kEach / kN; ++p) {
      if (first + p * kN >= experts) break;
      const Pack<float, kN> v =
          load_pack<kWhole, kN>(from, lane * (kEach / kN) + p, experts);
#pragma unroll
      for (int e = 0; e < kN; ++e) to[p * kN + e] = v.at[e];
    }
  };
  read(logits.row(t), s);
  if (options.score == RouterOptions::kSoftmax) {
    float max = -INFINITY, sum = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (first + e < experts) max = s[e] > max ? s[e] : max;
    }
    max = warp_max(max);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      s[e] = first + e < experts ? exp(s[e] - max) : 0.0f;
      sum += s[e];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int e = 0; e < kEach; ++e) s[e] /= sum;
  } else {
#pragma unroll
    for (int e = 0; e < kEach; ++e) s[e] = 1.0f / (1.0f + exp(-s[e]));
  }
  if (bias != nullptr) {
    float b[kEach];
    read(bias, b);
#pragma unroll
    for (int e = 0; e < kEach; ++e) s[e] += b[e];
  }
  unsigned keys[kEach];  // 0: taken, or no expert
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    keys[e] = first + e < experts ? key_of(s[e]) : 0;
  }
  if (options.top_groups < options.groups) {
    // The two largest of the lane's experts, then of the group's.
    unsigned best = 0, second = 0;
    const auto insert = [&](unsigned key) {
      second = max(second, min(best, key));
      best = max(best, key);
    };
#pragma unroll
    for (int e = 0; e < kEach; ++e) insert(keys[e]);
    for (int step = 1; step < lanes_per_group; step *= 2) {
      const unsigned other = __shfl_xor_sync(~0u, best, step);
      const unsigned other_second = __shfl_xor_sync(~0u, second, step);
      insert(other);
      insert(other_second);
    }
    const int group = lane / lanes_per_group;
    unsigned mine = 0;
    if (group < options.groups && lane % lanes_per_group == 0) {
      mine = key_of(second == 0 ? value_of(best)
                                : value_of(best) + value_of(second));
    }
    bool kept = false;
    for (int i = 0; i < options.top_groups; ++i) {
      const unsigned largest = __reduce_max_sync(~0u, mine);
      const int at = __ffs(__ballot_sync(~0u, mine == largest)) - 1;
      if (lane == at) mine = 0;
      kept |= at / lanes_per_group == group;
    }
    // Unchoosable, even where all choice values are negative.
    const unsigned lowest = key_of(-INFINITY);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (!kept && keys[e] != 0) keys[e] = lowest;
    }
  }
  for (int k = 0; k < options.top_k; ++k) {
    unsigned best = keys[0];
    int at = 0;
#pragma unroll
    for (int e = 1; e < kEach; ++e) {
      if (keys[e] > best) {
        best = keys[e];
        at = e;
      }
    }
    const unsigned largest = __reduce_max_sync(~0u, best);
    if (lane == __ffs(__ballot_sync(~0u, best == largest)) - 1) {
      ids(t, k) = first + at;
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if (e == at) keys[e] = 0;
      }
    }
  }
}

// router_choose_held_kernel() with kEach experts a lane, if groups lie in it.
template <int kEach>
bool launch_held(const Launch& l, const View<const float>& logits,
                 const View<const float>& bias, const RouterOptions& options,
                 const View<int32_t>& ids) {
  int lanes = 1;
  if (options.top_groups < options.groups) {
    const int64_t size = logits.size(1) / options.groups;
    lanes = static_cast<int>(size / kEach);
    if (size % kEach != 0 || !std::has_single_bit(static_cast<unsigned>(lanes)))
      return false;
  }
  const bool whole = packable(logits) && (!bias || packable(bias));
  const auto kernel = whole ? router_choose_held_kernel<true, kEach>
                            : router_choose_held_kernel<false, kEach>;
  const auto blocks =
      static_cast<unsigned>(ceil_div(logits.size(0), kChooseThreads / kWarp));
  kernel<<<blocks, kChooseThreads, 0, stream_of(l)>>>(
      rows<2>(logits), bias.data, options, lanes, rows<2>(ids));
  return true;
}

constexpr int kWeightThreads = 128, kWeightWarps = kWeightThreads / kWarp;

template <class A>
__global__ void __launch_bounds__(kWeightThreads)
    router_weights_kernel(Rows<const A, 2> logits, Rows<const int32_t, 2> ids,
                          RouterOptions options, Rows<A, 2> weight) {
  __shared__ A all_chosen[kWeightWarps][kMaxChoices];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t t = int64_t{blockIdx.x} * kWeightWarps + warp;
  if (t >= logits.size[0]) return;  // a warp as a whole
  A* const chosen = all_chosen[warp];
  const int top_k = options.top_k;
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
__global__ void __launch_bounds__(kWeightThreads)
    router_weights_backward_kernel(Rows<const A, 2> dweight,
                                   Rows<const A, 2> logits,
                                   Rows<const int32_t, 2> ids,
                                   RouterOptions options, Rows<A, 2> dlogits) {
  __shared__ A all_chosen[kWeightWarps][kMaxChoices];
  __shared__ A all_ds[kWeightWarps][kMaxChoices];
  __shared__ int32_t all_ids[kWeightWarps][kMaxChoices];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t t = int64_t{blockIdx.x} * kWeightWarps + warp;
  if (t >= logits.size[0]) return;  // a warp as a whole
  A *const chosen = all_chosen[warp], *const ds = all_ds[warp];
  int32_t* const id = all_ids[warp];
  const int top_k = options.top_k;
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
  if constexpr (std::is_same_v<A, float>) {
    const int64_t experts = logits_TE.size(1);
    const bool held =
        experts <= 4 * kWarp
            ? launch_held<4>(l, logits_TE, bias_E, options, ids_TK)
        : experts <= 8 * kWarp
            ? launch_held<8>(l, logits_TE, bias_E, options, ids_TK)
        : experts <= 16 * kWarp
            ? launch_held<16>(l, logits_TE, bias_E, options, ids_TK)
            : false;
    check_launch("router_choose");
    if (held) return;
  }
  router_choose_kernel<A><<<blocks, kWarp, 0, stream_of(l)>>>(
      rows<2>(logits_TE), bias_E.data, options, rows<2>(ids_TK));
  check_launch("router_choose");
}

template <class A>
void router_weights(Launch l, View<const A> logits_TE,
                    View<const int32_t> ids_TK, const RouterOptions& options,
                    View<A> weight_TK) {
  const auto blocks =
      static_cast<unsigned>(ceil_div(logits_TE.size(0), kWeightWarps));
  if (blocks == 0) return;
  router_weights_kernel<A><<<blocks, kWeightThreads, 0, stream_of(l)>>>(
      rows<2>(logits_TE), rows<2>(ids_TK), options, rows<2>(weight_TK));
  check_launch("router_weights");
}

template <class A>
void router_weights_backward(Launch l, View<const A> dweight_TK,
                             View<const A> logits_TE,
                             View<const int32_t> ids_TK,
                             const RouterOptions& options, View<A> dlogits_TE) {
  const auto blocks =
      static_cast<unsigned>(ceil_div(logits_TE.size(0), kWeightWarps));
  if (blocks == 0) return;
  router_weights_backward_kernel<A>
      <<<blocks, kWeightThreads, 0, stream_of(l)>>>(
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
