// The CUDA side of indexer_loss.h: the same contracts, shapes already checked.
// Ids and the inverse index are read on the device alone.
#pragma once

#include <cstddef>

#include "kernels/kernel.h"

namespace tapeline::cuda {

template <class T>
void indexer_loss_forward(Launch l, View<const T> qI_THD, View<const T> kI_SD,
                          View<const Accumulator<T>> w_TH, double index_scale,
                          View<const T> q_THD, View<const T> kv_SD,
                          View<const Accumulator<T>> lse_TH,
                          double attention_scale, View<const int32_t> ids_TK,
                          View<Accumulator<T>> loss_T,
                          View<Accumulator<T>> dscore_TK,
                          View<Accumulator<T>> target_TK);

template <class A>
void indexer_kl(Launch l, View<const A> scores_TK, View<const A> target_TK,
                View<const int32_t> ids_TK, View<A> loss_T, View<A> dscore_TK);

template <class T>
size_t indexer_loss_backward_workspace_bytes(const View<const T>& qI_THD,
                                             const View<const T>& kI_SD,
                                             const View<const int32_t>& ids_TK,
                                             double index_scale);

template <class T>
void indexer_loss_backward(Launch l, View<const Accumulator<T>> dscore_TK,
                           View<const Accumulator<T>> dloss_T,
                           View<const T> qI_THD, View<const T> kI_SD,
                           View<const Accumulator<T>> w_TH, double index_scale,
                           View<const int32_t> ids_TK,
                           View<const int32_t> inverse_offsets_S1,
                           View<const int32_t> inverse_entries, View<T> dqI_THD,
                           View<T> dkI_SD, View<Accumulator<T>> dw_TH,
                           std::byte* workspace);

}  // namespace tapeline::cuda
