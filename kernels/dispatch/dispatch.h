// Copies every token's row to the rows that route() gave it, and sums the
// gradients back.
//
//   forward   x_R[row[t, k]] = x[t]          for every row[t, k] >= 0
//   backward  dx[t] = sum_k dx_R[row[t, k]]  slots with row -1 are skipped
//
//   x, dx [T, D]   row [T, K] i32   x_R, dx_R [R, D]   T = float, bf16, double
// Rows from offsets[E] to R are neither read nor written. Backward overwrites
// dx; it adds in ascending k in fp32 (fp64) and rounds once, so a token without
// a row gets 0. Rows may be strided, the elements of a row are contiguous. One
// thread per token, no atomics.
// Bandwidth-bound: T + T K rows either way, as a token is read or written once.
#pragma once

#include <cstdint>

#include "kernels/kernel.h"

namespace tapeline {

template <class T>
void dispatch_forward(Launch, View<const T> x_TD, View<const int32_t> row_TK,
                      View<T> x_RD);

template <class T>
void dispatch_backward(Launch, View<const T> dx_RD, View<const int32_t> row_TK,
                       View<T> dx_TD);

inline Cost dispatch_cost(int64_t tokens, int64_t width, int64_t top_k,
                          int64_t element_bytes) {
  return {.bytes = 1.0 * tokens * (1 + top_k) * width * element_bytes +
                   4.0 * tokens * top_k};
}

}  // namespace tapeline
