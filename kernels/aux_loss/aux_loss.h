// Auxiliary losses of a router, and the bias rule that replaces them.
//
//   balance   mean over sequences of  sum_e f_e mean_t p[t, e],
//             f_e = E c_e / sum_e c_e          c: expert counts, no gradient
//   z loss    mean_t (ln sum_e exp l[t, e])^2
//   bias      b_e += rate sign(mean_e c - c_e), sign(0) = 0
//
// Every token routed K times gives sum_e c_e = T K, hence the usual E / (T K);
// dividing by the counts' own sum stays right when they were summed over ranks
// first. Balanced load gives 1. Without a coefficient: scale dloss.
//   kSigmoid        p = s / (sum_e s + 1e-20), s = sigmoid(l)   (Megatron-LM)
//   kSoftmax        p = softmax(l)                              (Switch, Qwen)
//   kBiasedSigmoid  p = (s + b) / (sum_e (s + b) + 1e-20)       (XTuner)
// With TokenSet::sequence_S1 this is DeepSeek-V3's sequence-wise loss (arXiv
// 2412.19437 eq. 17): counts and means per sequence, then the mean over the
// sequences that have a valid token. Sources: arXiv 2101.03961 eq. 4 (balance),
// 2202.08906 eq. 5 (z), 2408.15664 (bias).
//
// Padding (valid = 0) is never read, counts nowhere and gets gradient 0. No
// valid token: loss 0, gradient 0. Backward overwrites dlogits. A is float or
// double; rows of logits may be strided, their elements are contiguous;
// E <= 1024. Sums over tokens are made in f64 from a fixed cut into chunks.
#pragma once

#include <cstdint>

#include "kernels/kernel.h"

namespace tapeline {

// The tokens of a statistic. Either view may be empty.
struct TokenSet {
  View<const uint8_t> valid_T = {};  // 0 marks padding; empty: all are valid
  View<const int32_t> sequence_S1 =
      {};  // starts of S sequences, then T; empty: one
};

enum class BalanceKind { kSigmoid, kSoftmax, kBiasedSigmoid };

// Overwrites counts [S, E] (or [E] for one sequence) with the assignments of
// valid tokens; ids of -1 count nowhere. C is int32_t or int64_t.
template <class C>
void count_experts(Launch, View<const int32_t> ids_TK, const TokenSet&,
                   View<C> counts_SE);

// What a forward needs to use all of a GPU, of which it takes eight processors
// without. The bits differ.
inline constexpr int64_t kLossPartials = 2 * 264;

// loss [1]. `bias` [E] is read by kBiasedSigmoid alone and may be empty
// otherwise. counts [S, E] or [E].
template <class A>
void balance_loss_forward(Launch, BalanceKind, View<const A> logits_TE,
                          View<const A> bias_E, View<const int32_t> counts_SE,
                          const TokenSet&, View<A> loss_1,
                          View<double> partial = {});
template <class A>
void balance_loss_backward(Launch, double dloss, BalanceKind,
                           View<const A> logits_TE, View<const A> bias_E,
                           View<const int32_t> counts_SE, const TokenSet&,
                           View<A> dlogits_TE);

// loss [1]. Sequences do not matter here.
template <class A>
void z_loss_forward(Launch, View<const A> logits_TE, const TokenSet&,
                    View<A> loss_1, View<double> partial = {});
template <class A>
void z_loss_backward(Launch, double dloss, View<const A> logits_TE,
                     const TokenSet&, View<A> dlogits_TE);

// Once per optimizer step, with counts [E] summed over micro-batches and ranks,
// or [M, E], whose rows are added: the comparison with the mean is exact, so
// replicas stay equal. The bias is kept in fp32: a step of 1e-3 would vanish in
// bf16. clip_1 as in kernels/adamw/adamw.h: if it is not finite, nothing moves.
void update_router_bias(Launch, View<const int64_t> counts_ME, double rate,
                        View<float> bias_E, View<const double> clip_1 = {});

}  // namespace tapeline
