// y = T(x * rstd) * w,   rstd = 1 / sqrt(mean(x^2) + eps)
//
//   x, y, dy, dx [N, D] T     w [D] T     rstd [N], dw [D] Accumulator<T>
//   forward          overwrites y and rstd (saved for backward)
//   backward         dx = rstd * (g - x * rstd^2 * mean(g * x)),  g = dy * w;
//                    overwrites; dx may be dy
//   backward_weight  dw += sum over rows of dy * x * rstd, in order of rows
//   add_forward      sum = T(x + residual), and forward of sum: the bits of
//                    add() and then forward, in one pass
//   parts            Where P = rms_norm_parts() is not 0, backward may be given
//                    partial [P, D] to overwrite: the terms of dw, summed over
//                    P parts of the rows. add_parts does dw += the sum of
//                    these, in an order that is the device's own, and nothing
//                    reads dy and x again. P and orders follow from shapes,
//                    strides and alignment.
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
                       View<T> dx_ND, View<Accumulator<T>> partial_PD = {});

template <class T>
void rms_norm_backward_weight(Launch l, View<const T> dy_ND, View<const T> x_ND,
                              View<const Accumulator<T>> rstd_N,
                              View<Accumulator<T>> dw_D);

template <class T>
void add_rms_norm_forward(Launch l, View<const T> x_ND,
                          View<const T> residual_ND, View<const T> w_D,
                          float eps, View<T> sum_ND, View<T> y_ND,
                          View<Accumulator<T>> rstd_N);

// Of a backward of these views; may be 0.
template <class T>
int64_t rms_norm_parts(const Launch& l, const View<const T>& dy_ND,
                       const View<const T>& x_ND, const View<const T>& w_D,
                       const View<T>& dx_ND);
template <class A>
void rms_norm_add_parts(Launch l, View<const A> partial_PD, View<A> dw_D);

Cost rms_norm_forward_cost(int64_t n, int64_t d, int64_t element_bytes);
Cost rms_norm_backward_cost(int64_t n, int64_t d, int64_t element_bytes);

}  // namespace tapeline
