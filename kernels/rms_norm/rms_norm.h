// y = T(x * rstd) * w,   rstd = 1 / sqrt(mean(x^2) + eps)
//
//   x, y, dy, dx [N, D] T     w [D] T     rstd [N], dw [D] Accumulator<T>
//   forward          overwrites y and rstd (saved for backward)
//   backward         dx = rstd * (g - x * rstd^2 * mean(g * x)),  g = dy * w;
//                    overwrites; dx may be dy
//   backward_weight  dw += sum over rows of dy * x * rstd, in order of rows
// T in {float, bf16, double}; arithmetic in Accumulator<T>. The normed value is
// rounded to T before the weight, as transformers does; gradients take that
// rounding for the identity. Rows have last stride 1; w, rstd and dw are dense.
// Memory-bound. Zhang & Sennrich 2019.
#pragma once

#include "kernels/kernel.h"

namespace tapeline {

template <class T>
void rms_norm_forward(Launch l, View<const T> x_ND, View<const T> w_D,
                      float eps, View<T> y_ND, View<Accumulator<T>> rstd_N);

template <class T>
void rms_norm_backward(Launch l, View<const T> dy_ND, View<const T> x_ND,
                       View<const T> w_D, View<const Accumulator<T>> rstd_N,
                       View<T> dx_ND);

template <class T>
void rms_norm_backward_weight(Launch l, View<const T> dy_ND, View<const T> x_ND,
                              View<const Accumulator<T>> rstd_N,
                              View<Accumulator<T>> dw_D);

Cost rms_norm_forward_cost(int64_t n, int64_t d, int64_t element_bytes);
Cost rms_norm_backward_cost(int64_t n, int64_t d, int64_t element_bytes);

}  // namespace tapeline
