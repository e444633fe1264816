// The CUDA side of layer_norm.h: the same contracts, shapes already checked.
#pragma once

#include "kernels/kernel.h"

namespace tapeline::cuda {

template <class T>
void layer_norm_forward(Launch l, View<const T> x_ND, View<const T> w_D,
                        View<const T> b_D, float eps, View<T> y_ND,
                        View<Accumulator<T>> mean_N,
                        View<Accumulator<T>> rstd_N);

template <class T>
void layer_norm_backward(Launch l, View<const T> dy_ND, View<const T> x_ND,
                         View<const T> w_D, View<const Accumulator<T>> mean_N,
                         View<const Accumulator<T>> rstd_N, View<T> dx_ND,
                         View<Accumulator<T>> partial_P2D);

template <class T>
void layer_norm_backward_weight(Launch l, View<const T> dy_ND,
                                View<const T> x_ND,
                                View<const Accumulator<T>> mean_N,
                                View<const Accumulator<T>> rstd_N,
                                View<Accumulator<T>> dw_D,
                                View<Accumulator<T>> db_D);

template <class T>
int64_t layer_norm_parts(const View<const T>& dy_ND, const View<const T>& x_ND,
                         const View<const T>& w_D, const View<T>& dx_ND);
template <class A>
void layer_norm_add_parts(Launch l, View<const A> partial_P2D, View<A> dw_D,
                          View<A> db_D);

}  // namespace tapeline::cuda
