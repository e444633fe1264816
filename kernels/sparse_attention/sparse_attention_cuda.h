// The CUDA side of sparse_attention.h: the same contracts, shapes already
// checked. Ids and the inverse index are read on the device alone.
#pragma once

#include <cstddef>

#include "kernels/kernel.h"

namespace tapeline::cuda {

template <class T>
void sparse_attention_forward(Launch l, View<const T> q_THD,
                              View<const T> kv_SD, View<const int32_t> ids_TK,
                              double scale, View<T> o_THV,
                              View<Accumulator<T>> lse_TH);

template <class T>
size_t sparse_attention_backward_workspace_bytes(
    const View<const T>& q_THD, const View<const T>& kv_SD,
    const View<const int32_t>& ids_TK, const View<const T>& o_THV,
    double scale);

size_t invert_ids_workspace_bytes(const View<const int32_t>& ids_TK,
                                  int64_t keys);

void invert_ids(Launch l, View<const int32_t> ids_TK, View<int32_t> offsets_S1,
                View<int32_t> entries, std::byte* workspace);

template <class T>
void sparse_attention_backward(Launch l, View<const T> do_THV,
                               View<const T> q_THD, View<const T> kv_SD,
                               View<const int32_t> ids_TK, View<const T> o_THV,
                               View<const Accumulator<T>> lse_TH,
                               View<const int32_t> inverse_offsets_S1,
                               View<const int32_t> inverse_entries,
                               double scale, View<T> dq_THD, View<T> dkv_SD,
                               std::byte* workspace);

}  // namespace tapeline::cuda
