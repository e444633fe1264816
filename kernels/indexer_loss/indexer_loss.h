// How far the indexer's distribution over a query's selected keys is from what
// the main attention does with them, and the gradient of that.
//
//   p[t,j]  = (1/H) sum_h exp(scale q[t,h] . kv[id] - lse[t,h]),  id =
//   ids[t,j],
//             over max(sum_j p, 1e-10)                       the target,
//             detached
//   I[t,j]  = the indexer's score of key id (kernels/indexer/indexer.h)
//   loss[t] = sum_j p (log max(p, 1e-10) - log softmax_j(I))        KL(p ||
//   softmax) dscore  = softmax_j(I) - p                                      d
//   loss / d I
//
//   qI [T, Hi, Di]  kI [S, Di]  q [T, H, D]  kv [S, D]   T in {f32, bf16, f64}
//   w [T, Hi]  lse [T, H]  loss [T]  dscore [T, K]       Accumulator<T>
//   ids [T, K] i32, K <= kMaxSelected
//
// -1 in ids is skipped wherever it stands: dscore is 0 there. A row of -1 has
// loss 0. Rows are not weighted nor averaged: loss [T] is per query. q, kv and
// lse are those of the sparse attention over the same ids; no gradient reaches
// them. Last strides are 1. Rows are independent and sums have a fixed order,
// so the number of threads changes nothing. DeepSeek-V3.2 (2025), eq. 4, the
// sparse training stage.
#pragma once

#include <cstddef>

#include "kernels/attention/limits.h"
#include "kernels/kernel.h"

namespace tapeline {

// Of a query: a row's scores and target are on the CPU's stack.
inline constexpr int64_t kMaxSelected = 8192;

// Overwrites loss and dscore, and with p the target unless that is empty (0
// where ids are -1).
template <class T>
void indexer_loss_forward(Launch l, View<const T> qI_THD, View<const T> kI_SD,
                          View<const Accumulator<T>> w_TH, double index_scale,
                          View<const T> q_THD, View<const T> kv_SD,
                          View<const Accumulator<T>> lse_TH,
                          double attention_scale, View<const int32_t> ids_TK,
                          View<Accumulator<T>> loss_T,
                          View<Accumulator<T>> dscore_TK,
                          View<Accumulator<T>> target_TK = {});

// The same from scores and a target that are at hand; the target is used as it
// comes. A in {f32, f64}. Overwrites loss and dscore.
template <class A>
void indexer_kl(Launch l, View<const A> scores_TK, View<const A> target_TK,
                View<const int32_t> ids_TK, View<A> loss_T, View<A> dscore_TK);

// Bytes for what a fast path keeps of all pairs, where it takes these shapes.
template <class T>
size_t indexer_loss_backward_workspace_bytes(const Launch& l,
                                             const View<const T>& qI_THD,
                                             const View<const T>& kI_SD,
                                             const View<const int32_t>& ids_TK,
                                             double index_scale);

// Gradients of sum_t dloss[t] loss[t] with dscore from the forward. dloss [T]
// may have stride 0: one weight for all rows. Overwrites dqI, dkI and dw. The
// inverse is invert_ids (kernels/sparse_attention) of the same ids; dkI[s] adds
// its entries in ascending order or, the fast path, segments of them and then
// those. `workspace` is aligned to 16 bytes; nullptr where it takes none.
//
//   g = dloss[t] dscore[t,j]    x[h] = index_scale qI[t,h] . kI[id]
//   dw[h]  = sum_j g relu(x[h])     ds[h] = index_scale g w[h] where x[h] > 0
//   dqI[h] = sum_j ds[h] kI[id]     dkI[id] = sum_t,h ds[h] qI[t,h]
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

// With `selected` valid ids per query; a gathered key row counts once per
// query.
template <class T>
Cost indexer_loss_forward_cost(int64_t tokens, int64_t index_heads,
                               int64_t index_dim, int64_t heads, int64_t dim,
                               int64_t selected);
template <class T>
Cost indexer_loss_backward_cost(int64_t tokens, int64_t index_heads,
                                int64_t index_dim, int64_t selected);

}  // namespace tapeline
