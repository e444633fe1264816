// Router of a mixture-of-experts layer: which experts a token goes to, and with
// what weight (noaux_tc of DeepSeek-V3, arXiv 2412.19437 eq. 16; softmax of
// Qwen3-MoE).
//
//   s  = sigmoid(l) or softmax(l)                    l [T, E], s fp32 (fp64)
//   ch = s + b                                       b [E], for the choice
//   alone top_groups < groups: a group scores the sum of its 2 largest ch;
//   outside of
//     the top_groups best groups ch = -inf (not 0: ch can be negative)
//   ids = the top_k largest ch
//   w  = s[ids];  normalize: w /= sum w + 1e-20;  w *= scale
//
// The choice is not differentiable: backward goes through w alone and no
// gradient reaches b. Ids of an earlier choice may be given to router_weights,
// as recomputation must.
// A is float or double; rows may be strided, the elements of a row are
// contiguous. Limits: E <= 1024, top_k and top_groups <= 64. Deterministic: a
// token is one thread's, or on CUDA one warp's.
#pragma once

#include <cstdint>

#include "kernels/kernel.h"

namespace tapeline {

struct RouterOptions {
  enum Score { kSoftmax, kSigmoid } score = kSigmoid;
  int top_k = 1;
  int groups = 1, top_groups = 1;  // groups divides E
  bool normalize = true;
  double scale = 1;
};

inline constexpr int kMaxExperts = 1024;
inline constexpr int kMaxChoices = 64;  // top_k and top_groups

// ids [T, K] in descending order of ch, ties by the lower expert. NaN ranks
// below everything, -inf included, so ids are always distinct and in [0, E);
// the same holds for groups. `bias` [E] may be empty.
template <class A>
void router_choose(Launch, View<const A> logits_TE, View<const A> bias_E,
                   const RouterOptions&, View<int32_t> ids_TK);

// weight [T, K] for any ids; an id of -1 (no expert) weighs 0 and adds nothing
// to the sum.
template <class A>
void router_weights(Launch, View<const A> logits_TE, View<const int32_t> ids_TK,
                    const RouterOptions&, View<A> weight_TK);

// Overwrites dlogits [T, E]. With Z = sum_k s_k + 1e-20 over the chosen and
// g = scale dw:  ds_j = (g_j - sum_k g_k s_k / Z) / Z  (normalize; else g_j),
//   sigmoid  dl_j = s_j (1 - s_j) ds_j at the chosen, 0 elsewhere
//   softmax  dl_e = s_e (ds_e - sum_j ds_j s_j) for all e
template <class A>
void router_weights_backward(Launch, View<const A> dweight_TK,
                             View<const A> logits_TE,
                             View<const int32_t> ids_TK, const RouterOptions&,
                             View<A> dlogits_TE);

}  // namespace tapeline
