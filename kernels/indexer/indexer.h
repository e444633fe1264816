// The lightning indexer: how much each query wants each key, and the keys it
// takes.
//
//   score[t,s] = sum_h w[t,h] relu(scale * q[t,h] . k[s])   begin[t] <= s <
//   end[t] ids[t]     = the keys of the K largest scores, ascending, then -1
//
//   q [T, H, D]  k [S, D]   T in {f32, bf16, f64}, D <= kMaxHeadDim
//   w [T, H]  scores [T, S]                         Accumulator<T>
//
// w is used as it comes: weights_proj(x) H^-0.5 is the caller's product, and
// may be negative. Last strides are 1. Scores are -inf outside of the range;
// relu keeps NaN. A score's bits follow from its own query and key: heads are
// added in a fixed order, fused. On the CPU it is ascending; on tensor cores
// four lanes hold a query's heads, two neighbours in every eight each, so a
// lane adds its own in ascending order and then lanes 0 + 2 and 1 + 3 and both
// are added. No score depends on keys outside of the range.
// DeepSeek-V3.2 (2025), eq. 1 with the scale of GLM-5.
#pragma once

#include <cstddef>

#include "kernels/attention/key_range.h"
#include "kernels/attention/limits.h"
#include "kernels/kernel.h"

namespace tapeline {

// Overwrites scores.
template <class T>
void indexer_scores(Launch l, View<const T> q_THD, View<const T> k_SD,
                    View<const Accumulator<T>> w_TH, KeyRange range,
                    double scale, View<Accumulator<T>> scores_TS);

// The ids that top_k (kernels/top_k/top_k.h has the rules for ties, NaN and
// -inf) takes from those scores, the same bits, but with scores in `workspace`
// for a tile of rows at a time instead of for all. Overwrites ids.
template <class T>
void indexer_select(Launch l, View<const T> q_THD, View<const T> k_SD,
                    View<const Accumulator<T>> w_TH, KeyRange range,
                    double scale, int selected, View<int32_t> ids_TK,
                    std::byte* workspace);

// Bytes of `workspace`, aligned for Accumulator<T>: up to 128 rows of scores,
// or 512 on CUDA, where fewer would leave processors idle.
template <class T>
size_t indexer_select_workspace_bytes(const Launch& l, int64_t tokens,
                                      int64_t keys);

// `pairs` counts (query, key) pairs in range.
template <class T>
Cost indexer_scores_cost(int64_t tokens, int64_t keys, int64_t heads,
                         int64_t dim, int64_t pairs);
template <class T>
Cost indexer_select_cost(int64_t tokens, int64_t keys, int64_t heads,
                         int64_t dim, int64_t pairs, int64_t selected);

}  // namespace tapeline
