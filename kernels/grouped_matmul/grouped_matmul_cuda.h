// The CUDA side of grouped_matmul.h: the same contracts, shapes already
// checked. The offsets are read on the device alone.
#pragma once

#include "kernels/kernel.h"

namespace tapeline::cuda {

template <class T>
void grouped_matmul_forward(Launch l, View<const T> x_RD, View<const T> w_EFD,
                            View<const int32_t> offsets, View<T> y_RF);

template <class T>
void grouped_matmul_dgrad(Launch l, View<const T> dy_RF, View<const T> w_EFD,
                          View<const int32_t> offsets, View<T> dx_RD);

template <class T, class G>
void grouped_matmul_wgrad(Launch l, View<const T> dy_RF, View<const T> x_RD,
                          View<const int32_t> offsets, View<G> dw_EFD);

}  // namespace tapeline::cuda
