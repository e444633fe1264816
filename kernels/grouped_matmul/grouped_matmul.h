// One linear layer per expert over rows grouped by expert.
//
// With e the expert of row r, offsets[e] <= r < offsets[e+1]:
//   forward  y[r]  = w[e] x[r]               overwrites
//   dgrad    dx[r] = w[e]^T dy[r]            overwrites
//   wgrad    dw[e] += sum_r dy[r] x[r]^T     accumulates
//
//   x, dx [R, D]   y, dy [R, F]   w [E, F, D]   T in {float, bf16, double}
//   dw [E, F, D]   G = float for float and bf16, double for double
//   offsets [E+1] int32, ascending, within [0, R] (CHECK on the CPU)
// R is a capacity: rows below offsets[0] or from offsets[E] on are neither read
// nor written. An expert without rows adds nothing to its dw. Rows have last
// stride 1. Sums are in Accumulator<T> and rounded once; outputs overlap no
// input. Compute-bound: 2 R F D flops each. On CUDA bf16 goes to tensor cores
// where grouped_matmul_fast.h says so.
#pragma once

#include "kernels/kernel.h"

namespace tapeline {

template <class T>
void grouped_matmul_forward(Launch l, View<const T> x_RD, View<const T> w_EFD,
                            View<const int32_t> offsets, View<T> y_RF);

template <class T>
void grouped_matmul_dgrad(Launch l, View<const T> dy_RF, View<const T> w_EFD,
                          View<const int32_t> offsets, View<T> dx_RD);

template <class T, class G>
void grouped_matmul_wgrad(Launch l, View<const T> dy_RF, View<const T> x_RD,
                          View<const int32_t> offsets, View<G> dw_EFD);

// Of any of the three, for `rows` rows in all.
Cost grouped_matmul_cost(int64_t experts, int64_t rows, int64_t f, int64_t d,
                         int64_t element_bytes);

}  // namespace tapeline
