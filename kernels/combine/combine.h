// Weighted sum of a token's expert outputs.
//
//   forward   y[t] = sum_k w[t, k] x_R[row[t, k]]
//   backward  dx_R[row[t, k]] = w[t, k] dy[t]
//             dw[t, k] = <dy[t], x_R[row[t, k]]>, 0 where row is -1
//
//   x_R, dx_R [R, D]   w, dw [T, K] fp32 (fp64)   row [T, K] i32   y, dy [T, D]
// Slots with row -1 are skipped; rows from offsets[E] to R are neither read nor
// written. Everything else is overwritten. Sums run in fp32 (fp64), over k in
// ascending order and over D in the order of dot() in simd_math.h, and are
// rounded once. Rows may be strided, the elements of a row are contiguous. One
// thread per token, no atomics. Bandwidth-bound: forward reads T K rows and
// writes T; backward reads T K + T rows and writes T K, since both gradients
// come out of one pass over a token.
#pragma once

#include <cstdint>

#include "kernels/kernel.h"

namespace tapeline {

template <class T>
void combine_forward(Launch, View<const T> x_RD,
                     View<const Accumulator<T>> weight_TK,
                     View<const int32_t> row_TK, View<T> y_TD);

template <class T>
void combine_backward(Launch, View<const T> dy_TD, View<const T> x_RD,
                      View<const Accumulator<T>> weight_TK,
                      View<const int32_t> row_TK, View<T> dx_RD,
                      View<Accumulator<T>> dweight_TK);

inline Cost combine_forward_cost(int64_t tokens, int64_t width, int64_t top_k,
                                 int64_t element_bytes) {
  return {.flops = 2.0 * tokens * top_k * width,
          .bytes = 1.0 * tokens * (top_k + 1) * width * element_bytes +
                   8.0 * tokens * top_k};
}
inline Cost combine_backward_cost(int64_t tokens, int64_t width, int64_t top_k,
                                  int64_t element_bytes) {
  return {.flops = 3.0 * tokens * top_k * width,
          .bytes = 1.0 * tokens * (2 * top_k + 1) * width * element_bytes +
                   12.0 * tokens * top_k};
}

}  // namespace tapeline
