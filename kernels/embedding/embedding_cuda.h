// The CUDA side of embedding.h: the same contracts, shapes already checked.
#pragma once

#include <cstddef>

#include "kernels/kernel.h"

namespace tapeline::cuda {

template <class T>
void embedding_forward(Launch l, View<const int32_t> ids_T,
                       View<const T> table_VD, View<T> y_TD);

template <class T>
void embedding_backward(Launch l, View<const int32_t> ids_T,
                        View<const T> dy_TD, View<Accumulator<T>> dtable_VD,
                        int64_t padding_id, std::byte* workspace);

// Fewer tokens are looked through in less time than it takes to group them.
inline constexpr int64_t kMostTokensUngrouped = 2048;
size_t embedding_grouped_bytes(int64_t tokens, int64_t vocabulary);
template <class T>
void embedding_backward_grouped(Launch l, View<const int32_t> ids_T,
                                View<const T> dy_TD,
                                View<Accumulator<T>> dtable_VD,
                                int64_t padding_id, std::byte* workspace);

}  // namespace tapeline::cuda
