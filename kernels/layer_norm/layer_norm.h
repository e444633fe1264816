// y = (x - mean) * rstd * w + b,  rstd = 1 / sqrt(variance + eps)   Ba 2016
// mean and variance (of all D, not D - 1) are those of a row.
//
//   x, y, dy, dx [N, D] T    w, b [D] T    mean, rstd [N], dw, db [D]
//                                          Accumulator<T>
//   forward          overwrites y, mean and rstd (saved for backward)
//   backward         with g = dy * w and h = (x - mean) * rstd:
//                    dx = rstd * (g - mean(g) - h * mean(g * h));
//                    overwrites; dx may be dy
//   backward_weight  dw += sum over rows of dy * h,  db += sum of dy,
//                    in order of rows
//   parts            Where P = layer_norm_parts() is not 0, backward may be
//                    given partial [P, 2, D] to overwrite: the terms of dw and
//                    of db, summed over P parts of the rows. add_parts does dw
//                    and db += the sum of these, in an order that is the
//                    device's own, and nothing reads dy and x again.
// P, orders and the bits of a forward follow from shapes, strides and
// alignment: aligned rows have kernels of their own.
// T in {float, bf16, double}; arithmetic in Accumulator<T>, y is rounded once.
// The variance is that of the deviations from the mean (two passes): rows far
// from zero keep their digits. Rows have last stride 1; the rest is dense.
// Memory-bound.
#pragma once

#include "kernels/kernel.h"

namespace tapeline {

template <class T>
void layer_norm_forward(Launch l, View<const T> x_ND, View<const T> w_D,
                        View<const T> b_D, float eps, View<T> y_ND,
                        View<Accumulator<T>> mean_N,
                        View<Accumulator<T>> rstd_N);

template <class T>
void layer_norm_backward(Launch l, View<const T> dy_ND, View<const T> x_ND,
                         View<const T> w_D, View<const Accumulator<T>> mean_N,
                         View<const Accumulator<T>> rstd_N, View<T> dx_ND,
                         View<Accumulator<T>> partial_P2D = {});

template <class T>
void layer_norm_backward_weight(Launch l, View<const T> dy_ND,
                                View<const T> x_ND,
                                View<const Accumulator<T>> mean_N,
                                View<const Accumulator<T>> rstd_N,
                                View<Accumulator<T>> dw_D,
                                View<Accumulator<T>> db_D);

// Of a backward of these views; may be 0.
template <class T>
int64_t layer_norm_parts(const Launch& l, const View<const T>& dy_ND,
                         const View<const T>& x_ND, const View<const T>& w_D,
                         const View<T>& dx_ND);
template <class A>
void layer_norm_add_parts(Launch l, View<const A> partial_P2D, View<A> dw_D,
                          View<A> db_D);

Cost layer_norm_forward_cost(int64_t n, int64_t d, int64_t element_bytes);
Cost layer_norm_backward_cost(int64_t n, int64_t d, int64_t element_bytes);

}  // namespace tapeline
