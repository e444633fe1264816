// The CUDA side of dispatch.h: the same contracts, shapes already checked.
#pragma once

#include "kernels/kernel.h"

namespace tapeline::cuda {

template <class T>
void dispatch_forward(Launch, View<const T> x_TD, View<const int32_t> row_TK,
                      View<T> x_RD);

template <class T>
void dispatch_backward(Launch, View<const T> dx_RD, View<const int32_t> row_TK,
                       View<T> dx_TD);

}  // namespace tapeline::cuda
