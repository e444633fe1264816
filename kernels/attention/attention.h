// Softmax attention of query rows over ranges of key rows, with grouped heads.
//
//   s[t,h,j] = scale * q[t,h] . k[j,h/(H/G)]     begin[t] <= j < end[t]
//   lse[t,h] = log sum_j exp(s[t,h,j])           natural logarithm
//   o[t,h]   = sum_j exp(s[t,h,j] - lse[t,h]) v[j,h/(H/G)]
//
//   q [T, H, D]  k [S, G, D]  v [S, G, V]  o [T, H, V]   T in {f32, bf16, f64}
//   lse [T, H]                                           Accumulator<T>
//
// H is a multiple of G; D and V differ freely up to kMaxHeadDim. Any strides
// but for the last, which is 1. A row without keys has o = 0, lse = +inf and
// gradient 0. Keys outside a row's range are not read on its behalf: NaNs there
// stay there. Scores, probabilities and sums are in Accumulator<T>; P is never
// rounded to T.
//
// Rows are independent: the bits of a row follow from its own query and keys,
// whatever other rows are in the call (so decoding one token with a cache gives
// the bits of the whole sequence), and never from the number of threads.
// Vaswani et al. 2017, eq. 1; tiles with a running maximum: Milakov &
// Gimelshein 2018; gradients from lse: Dao et al. 2022, section 3.1 and
// appendix B.
#pragma once

#include <cstddef>

#include "kernels/attention/key_range.h"
#include "kernels/attention/limits.h"
#include "kernels/kernel.h"

namespace tapeline {

// Overwrites o and lse.
template <class T>
void attention_forward(Launch l, View<const T> q_THD, View<const T> k_SGD,
                       View<const T> v_SGV, KeyRange range, double scale,
                       View<T> o_THV, View<Accumulator<T>> lse_TH);

// Bytes of the backward pass's workspace, aligned to 128: what a fast path
// keeps where it takes these shapes, else 0.
template <class T>
size_t attention_backward_workspace_bytes(
    const Launch& l, const View<const T>& q_THD, const View<const T>& k_SGD,
    const View<const T>& v_SGV, const View<const T>& o_THV, double scale);

// Gradients of sum(do * o); lse receives none. Overwrites dq, dk and dv.
//
//   p = exp(s - lse)    ds = p (do . v - do . o)
//   dq = scale * sum_j ds k    dk = scale * sum_t ds q    dv = sum_t p do
//
// dk and dv add queries in ascending order, and heads within a query. Keys and
// queries each recompute the scores, so the CPU needs no workspace. On tensor
// cores p and ds are rounded to bf16, and dk and dv add heads in ascending
// order and queries within a head.
template <class T>
void attention_backward(Launch l, View<const T> do_THV, View<const T> q_THD,
                        View<const T> k_SGD, View<const T> v_SGV,
                        View<const T> o_THV, View<const Accumulator<T>> lse_TH,
                        KeyRange range, double scale, View<T> dq_THD,
                        View<T> dk_SGD, View<T> dv_SGV, std::byte* workspace);

// `pairs` counts (query, key) pairs in range; bytes for elements of T.
template <class T>
Cost attention_forward_cost(int64_t tokens, int64_t keys, int64_t heads,
                            int64_t groups, int64_t qk_dim, int64_t v_dim,
                            int64_t pairs);
template <class T>
Cost attention_backward_cost(int64_t tokens, int64_t keys, int64_t heads,
                             int64_t groups, int64_t qk_dim, int64_t v_dim,
                             int64_t pairs);

}  // namespace tapeline
