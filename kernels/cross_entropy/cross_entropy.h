// Cross-entropy of each token's logits against its label, without a reduction
// over tokens: the caller sums with its own weights and denominators.
//
//   lse[t]  = ln sum_v exp(logits[t, v])            natural log
//   loss[t] = lse[t] - logits[t, label[t]]
//   backward, in place:  logits[t, v] := w[t] (exp(logits[t, v] - lse[t])
//                                              - [v = label[t]])
//   forward_backward     both, bit for bit, of one row after the other
//   scale, in place:     dlogits[t, v] := factor dlogits[t, v]
//
//   logits [T, V] float, bf16 or double   labels [T] i32   loss, lse, w [T]
//   fp32 (fp64); softmax in fp32 (fp64), each dlogit rounded once
// Label -100 is ignored: loss and lse are 0, its dlogits are 0 and its logits
// are never read, so padding may hold anything. w = 0 also gives exact zeros.
// Any other label outside of [0, V) is a CHECK failure on the CPU.
// -inf logits have probability 0. A row that overflowed (+inf or NaN among its
// logits, or nothing but -inf) gets a loss that is not finite: no error hides.
// loss and lse are overwritten. Rows may be strided, the elements of a row are
// contiguous. One thread per row; sums over V in the order of lane_sum() in
// simd_math.h.
// Bandwidth-bound: forward reads T V twice (the second time from a cache if the
// row fits), backward reads and writes T V, and so does forward_backward where
// a row stays in a cache or in shared memory. scale rounds a dlogit again; a
// factor of 1, which is read where the kernel runs, moves and changes nothing.
#pragma once

#include <cstdint>

#include "kernels/kernel.h"

namespace tapeline {

inline constexpr int32_t kIgnoredLabel = -100;

template <class T>
void cross_entropy_forward(Launch, View<const T> logits_TV,
                           View<const int32_t> labels_T,
                           View<Accumulator<T>> loss_T,
                           View<Accumulator<T>> lse_T);

template <class T>
void cross_entropy_backward(Launch, View<T> logits_TV,
                            View<const int32_t> labels_T,
                            View<const Accumulator<T>> lse_T,
                            View<const Accumulator<T>> weight_T);

template <class T>
void cross_entropy_forward_backward(Launch, View<T> logits_TV,
                                    View<const int32_t> labels_T,
                                    View<const Accumulator<T>> weight_T,
                                    View<Accumulator<T>> loss_T,
                                    View<Accumulator<T>> lse_T);

// `factor` is one number.
template <class T>
void cross_entropy_scale(Launch, View<T> dlogits_TV,
                         View<const Accumulator<T>> factor);

inline Cost cross_entropy_cost(int64_t tokens, int64_t vocabulary,
                               int64_t element_bytes, bool backward) {
  const double elements = 1.0 * tokens * vocabulary;
  return {.flops = 4 * elements,
          .bytes = (backward ? 2 : 1) * elements * element_bytes};
}

}  // namespace tapeline
