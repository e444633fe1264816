// The CUDA side of indexer.h: the same contracts, shapes already checked. The
// ranges are read on the device alone.
#pragma once

#include <cstddef>

#include "kernels/attention/key_range.h"
#include "kernels/kernel.h"

namespace tapeline::cuda {

template <class T>
void indexer_scores(Launch l, View<const T> q_THD, View<const T> k_SD,
                    View<const Accumulator<T>> w_TH, KeyRange range,
                    double scale, View<Accumulator<T>> scores_TS);

// `rows` is how many rows of scores the workspace holds.
template <class T>
void indexer_select(Launch l, View<const T> q_THD, View<const T> k_SD,
                    View<const Accumulator<T>> w_TH, KeyRange range,
                    double scale, int selected, View<int32_t> ids_TK,
                    std::byte* workspace, int64_t rows);

}  // namespace tapeline::cuda
