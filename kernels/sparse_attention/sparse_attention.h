// Attention of every query over its own list of keys; one key row serves all
// heads, and its first columns are the value (absorbed MLA, as MQA).
//
//   s[t,h,j] = scale * q[t,h] . kv[ids[t,j]]      over ids[t,j] >= 0
//   lse[t,h] = log sum_j exp(s[t,h,j])            natural logarithm
//   o[t,h]   = sum_j exp(s[t,h,j] - lse[t,h]) kv[ids[t,j], 0:V]
//
//   q [T, H, D]  kv [S, D]  ids [T, K] i32  o [T, H, V], V <= D <= kMaxHeadDim
//   lse [T, H] Accumulator<T>                       T in {f32, bf16, f64}
//
// ids are key rows; -1 is skipped wherever it stands, an id that occurs twice
// counts twice. Last strides are 1. A row of one id has dq = 0 exactly; a row
// of -1 has o = 0, lse = +inf and gradient 0. Scores, probabilities and sums
// are in Accumulator<T>. Ids are used in the order given, so a row's bits
// follow from the sequence of its ids with the -1 left out; never from other
// rows or the number of threads. GLM-5 and DeepSeek-V3.2 sparse attention;
// gradients from lse as in Dao et al. 2022, appendix B.
#pragma once

#include <cstddef>

#include "kernels/attention/limits.h"
#include "kernels/kernel.h"

namespace tapeline {

// Overwrites o and lse.
template <class T>
void sparse_attention_forward(Launch l, View<const T> q_THD,
                              View<const T> kv_SD, View<const int32_t> ids_TK,
                              double scale, View<T> o_THV,
                              View<Accumulator<T>> lse_TH);

// Which (query, slot) pairs chose each key, for sums over queries without
// atomics. Entry e = t K + j stands for ids[t, j]. The entries of key s are
// entries[offsets[s]] .. entries[offsets[s + 1] - 1], ascending; offsets [S +
// 1], entries [at least T K], of which those from offsets[S] on stay as they
// are. T K < 2^31. Overwrites offsets and the entries in use. `workspace` is
// aligned for int32_t; without one, a GPU reads the ids many times more.
void invert_ids(Launch l, View<const int32_t> ids_TK, View<int32_t> offsets_S1,
                View<int32_t> entries, std::byte* workspace = nullptr);
// At most 13 MiB, or 4 bytes a key.
size_t invert_ids_workspace_bytes(const Launch& l,
                                  const View<const int32_t>& ids_TK,
                                  int64_t keys);

// Bytes for the probabilities and score gradients of all pairs, or for what a
// fast path keeps instead, where it takes these shapes.
template <class T>
size_t sparse_attention_backward_workspace_bytes(
    const Launch& l, const View<const T>& q_THD, const View<const T>& kv_SD,
    const View<const int32_t>& ids_TK, const View<const T>& o_THV,
    double scale);

// Gradients of sum(do * o); lse receives none. Overwrites dq and dkv (keys that
// nobody chose get 0). The inverse is invert_ids of the same ids. dkv[s] adds
// its entries in ascending order, in Accumulator<T>; `workspace` is aligned for
// Accumulator<T>.
//
//   p = exp(s - lse)    ds = scale p (do . kv[0:V] - do . o)
//   dq = sum_j ds kv    dkv = sum_t,h ds q    dkv[0:V] += sum_t,h p do
template <class T>
void sparse_attention_backward(Launch l, View<const T> do_THV,
                               View<const T> q_THD, View<const T> kv_SD,
                               View<const int32_t> ids_TK, View<const T> o_THV,
                               View<const Accumulator<T>> lse_TH,
                               View<const int32_t> inverse_offsets_S1,
                               View<const int32_t> inverse_entries,
                               double scale, View<T> dq_THD, View<T> dkv_SD,
                               std::byte* workspace);

// With `selected` valid ids per query; a gathered key row counts once per
// query.
template <class T>
Cost sparse_attention_forward_cost(int64_t tokens, int64_t heads, int64_t dim,
                                   int64_t v_dim, int64_t selected);
template <class T>
Cost sparse_attention_backward_cost(int64_t tokens, int64_t heads, int64_t dim,
                                    int64_t v_dim, int64_t selected);

}  // namespace tapeline
