// The CUDA side of swiglu.h: the same contracts, shapes already checked.
#pragma once

#include "kernels/kernel.h"

namespace tapeline::cuda {

template <class T>
void swiglu_forward(Launch l, View<const T> gate, View<const T> up, View<T> y,
                    View<const int32_t> rows);

template <class T>
void swiglu_backward(Launch l, View<const T> dy, View<const T> gate,
                     View<const T> up, View<T> dgate, View<T> dup,
                     View<const int32_t> rows);

}  // namespace tapeline::cuda
