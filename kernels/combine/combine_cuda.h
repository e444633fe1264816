// The CUDA side of combine.h: the same contracts, shapes already checked.
#pragma once

#include "kernels/kernel.h"

namespace tapeline::cuda {

template <class T>
void combine_forward(Launch, View<const T> x_RD,
                     View<const Accumulator<T>> weight_TK,
                     View<const int32_t> row_TK, View<T> y_TD);

template <class T>
void combine_backward(Launch, View<const T> dy_TD, View<const T> x_RD,
                      View<const Accumulator<T>> weight_TK,
                      View<const int32_t> row_TK, View<T> dx_RD,
                      View<Accumulator<T>> dweight_TK);

}  // namespace tapeline::cuda
