// The CUDA side of rms_norm.h: the same contracts, shapes already checked.
#pragma once

#include "kernels/kernel.h"

namespace tapeline::cuda {

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

}  // namespace tapeline::cuda
