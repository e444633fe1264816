// The CUDA side of embedding.h: the same contracts, shapes already checked.
#pragma once

#include "kernels/kernel.h"

namespace tapeline::cuda {

template <class T>
void embedding_forward(Launch l, View<const int32_t> ids_T,
                       View<const T> table_VD, View<T> y_TD);

template <class T>
void embedding_backward(Launch l, View<const int32_t> ids_T,
                        View<const T> dy_TD, View<Accumulator<T>> dtable_VD,
                        int64_t padding_id);

}  // namespace tapeline::cuda
