#include <algorithm>
#include <cmath>

#include "kernels/attention/rows.h"
#include "kernels/attention/tile.h"
#include "kernels/cuda_dispatch.h"
#include "kernels/indexer/index_scores.h"
#include "kernels/indexer_loss/indexer_loss.h"
#include "kernels/indexer_loss/indexer_loss_cuda.h"
#include "kernels/sparse_attention/selected.h"

namespace tapeline {
namespace {

using internal::add_product;
using internal::check_ids;
using internal::dots;
using internal::gather;
using internal::heads_of;
using internal::index_scores;
using internal::kConverted;
using internal::kKeysPerChunk;
using internal::kKeyTile;
using internal::kRowTile;
using internal::plain;
using internal::Rows;
using internal::Selected;
using internal::transposed;
using internal::visit_entries;
using internal::visit_selected;

constexpr int64_t kQueriesPerChunk = 4;
constexpr double kSmallest = 1e-10;  // of a probability under a logarithm

// The valid entries of a row, side by side, with their slots.
template <class A>
struct Row {
  int64_t count = 0;
  A score[kMaxSelected], target[kMaxSelected];
  int32_t slot[kMaxSelected];
};

// Writes the row's loss and dscore [K].
template <class A>
void kl_row(Row<A>& row, int64_t k, A* loss, A* dscore) {
  std::fill_n(dscore, k, A(0));
  *loss = 0;
  if (row.count == 0) return;
  const A max = max_of(row.score, row.count);
  const A log_sum = max + std::log(lane_sum<A>(row.count, [&](int64_t j) {
                      return exp_simd(row.score[j] - max);
                    }));
  *loss = lane_sum<A>(row.count, [&](int64_t j) {
    const A p = row.target[j];
    return p * (std::log(std::max(p, A(kSmallest))) - (row.score[j] - log_sum));
  });
  for (int64_t j = 0; j < row.count; ++j) {
    dscore[row.slot[j]] = exp_simd(row.score[j] - log_sum) - row.target[j];
  }
}

// The main attention's probabilities of a tile's keys, summed over heads.
template <class T, class A = Accumulator<T>>
void sum_probabilities(const View<const T>& q_THD, const View<const A>& lse_TH,
                       int64_t t, A scale, Rows<const A> keys, int64_t n,
                       A* out) {
  A q_buffer[kConverted<T, kRowTile>], score_buffer[kRowTile * kKeyTile];
  const Rows<A> score{score_buffer, kKeyTile};
  const int64_t heads = q_THD.size(1);
  std::fill_n(out, n, A(0));
  for (int64_t h = 0; h < heads; h += kRowTile) {
    const int64_t count = std::min<int64_t>(kRowTile, heads - h);
    dots(count, n, q_THD.size(2), heads_of(q_THD, t, h, count, q_buffer), keys,
         score);
    for (int64_t m = 0; m < count; ++m) {
      const A norm = lse_TH(t, h + m);
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        out[j] += exp_simd(score[m][j] * scale - norm);
      }
    }
  }
}

template <class A>
void normalise(A* p, int64_t n, int64_t heads) {
  for (int64_t j = 0; j < n; ++j) p[j] /= static_cast<A>(heads);
  const A total = std::max(sum(p, n), A(kSmallest));
  for (int64_t j = 0; j < n; ++j) p[j] /= total;
}

template <class T>
void check_indexer(const char* op, const View<const T>& q,
                   const View<const T>& k, const View<const Accumulator<T>>& w,
                   const View<const int32_t>& ids,
                   const View<const Accumulator<T>>& dscore) {
  CHECK(q.rank() == 3 && k.rank() == 2 && q.size(2) == k.size(1) &&
        q.size(2) <= kMaxHeadDim && (w.shape == Shape{q.size(0), q.size(1)}) &&
        ids.rank() == 2 && ids.size(0) == q.size(0) &&
        ids.size(1) <= kMaxSelected && dscore.shape == ids.shape &&
        dense_rows(q) && dense_rows(k) && dense_rows(ids) && dense_rows(dscore))
      << "[" << op << "] indexer: q is " << describe(q) << ", k is "
      << describe(k) << ", w is " << describe(w) << ", ids is " << describe(ids)
      << ", dscore is " << describe(dscore);
}

template <class T>
struct Backward {
  using A = Accumulator<T>;
  View<const A> dscore, dloss;
  View<const T> q, k;
  View<const A> w;
  A scale;
  View<const int32_t> ids, offsets, entries;
  View<T> dq, dk;
  View<A> dw;
  int64_t heads = q.size(1), dim = q.size(2), slots = ids.size(1);

  // Turns x = q . k of heads [h, h + n) and `keys` keys into ds, given g
  // [keys]. Adds sum_j g relu(x) of each head to dw_sum unless that is null.
  void gate(int64_t t, int64_t h, int64_t n, int64_t keys, const A* g,
            Rows<A> x, A* dw_sum) const {
    for (int64_t m = 0; m < n; ++m) {
      const A weight = w(t, h + m) * scale;
      A* row = x[m];
      if (dw_sum != nullptr) {
        dw_sum[m] += lane_sum<A>(keys, [&](int64_t j) {
          const A s = row[j] * scale;
          return s > 0 ? g[j] * s : A(0);
        });
      }
#pragma omp simd
      for (int64_t j = 0; j < keys; ++j) {
        row[j] = row[j] * scale > 0 ? g[j] * weight : A(0);
      }
    }
  }

  void query(int64_t t) const {
    A q_buffer[kConverted<T, kRowTile>], k_buffer[kKeyTile * kMaxHeadDim];
    A x_buffer[kRowTile * kKeyTile], dq_buffer[kRowTile * kMaxHeadDim];
    const Rows<A> x{x_buffer, kKeyTile}, sum{dq_buffer, dim};
    const int32_t* row = ids.data + t * ids.strides[0];
    for (int64_t h = 0; h < heads; h += kRowTile) {
      const int64_t n = std::min<int64_t>(kRowTile, heads - h);
      const Rows<const A> queries = heads_of(q, t, h, n, q_buffer);
      A dw_sum[kRowTile] = {};
      std::fill_n(dq_buffer, n * dim, A(0));
      visit_selected(row, slots, [&](const Selected& tile) {
        const Rows<const A> keys = gather(k, tile, k_buffer);
        A g[kKeyTile];
        for (int j = 0; j < tile.count; ++j) {
          g[j] = dloss(t) * dscore(t, tile.slot[j]);
        }
        dots(n, tile.count, dim, queries, keys, x);
        gate(t, h, n, tile.count, g, x, dw_sum);
        add_product(n, dim, tile.count, plain(x), keys, sum);
      });
      for (int64_t m = 0; m < n; ++m) {
        convert(sum[m], &dq(t, h + m, 0), dim);
        dw(t, h + m) = dw_sum[m];
      }
    }
  }

  // dk of keys [first, last). Recomputes q . k, the same bits as in query():
  // cheaper than a workspace for the ds of all pairs.
  void keys(int64_t first, int64_t last) const {
    A sum_buffer[kKeysPerChunk * kMaxHeadDim];
    A k_buffer[kConverted<T, kKeysPerChunk>];
    std::fill_n(sum_buffer, (last - first) * dim, A(0));
    const Rows<A> sum{sum_buffer, dim};
    const Rows<const A> rows =
        internal::converted<T>({k.data + first * k.strides[0], k.strides[0]},
                               last - first, dim, k_buffer);
    visit_entries(offsets, entries, first, last, q.size(0), slots,
                  heads * dim * int64_t{sizeof(T)},
                  [&](int64_t s, int32_t entry) {
                    add_entry(entry, rows.from(s - first), sum.from(s - first));
                  });
    for (int64_t s = first; s < last; ++s) {
      convert(sum[s - first], &dk(s, 0), dim);
    }
  }

  void add_entry(int32_t entry, Rows<const A> key, Rows<A> sum) const {
    A q_buffer[kConverted<T, kRowTile>], x_buffer[kRowTile];
    const Rows<A> x{x_buffer, 1};
    const int64_t t = entry / static_cast<int32_t>(slots);
    const A g = dloss(t) * dscore(t, entry - t * slots);
    for (int64_t h = 0; h < heads; h += kRowTile) {
      const int64_t n = std::min<int64_t>(kRowTile, heads - h);
      const Rows<const A> queries = heads_of(q, t, h, n, q_buffer);
      dots(n, 1, dim, queries, key, x);
      gate(t, h, n, 1, &g, x, nullptr);
      add_product(1, dim, n, transposed(x), queries, sum);
    }
  }
};

}  // namespace

template <class T>
void indexer_loss_forward(Launch l, View<const T> qI_THD, View<const T> kI_SD,
                          View<const Accumulator<T>> w_TH, double index_scale,
                          View<const T> q_THD, View<const T> kv_SD,
                          View<const Accumulator<T>> lse_TH,
                          double attention_scale, View<const int32_t> ids_TK,
                          View<Accumulator<T>> loss_T,
                          View<Accumulator<T>> dscore_TK,
                          View<Accumulator<T>> target_TK) {
  if (l.dry) return;
  using A = Accumulator<T>;
  check_indexer<T>("indexer_loss", qI_THD, kI_SD, w_TH, ids_TK, dscore_TK);
  const int64_t tokens = qI_THD.size(0), slots = ids_TK.size(1);
  CHECK(q_THD.rank() == 3 && kv_SD.rank() == 2 && q_THD.size(0) == tokens &&
        q_THD.size(2) == kv_SD.size(1) && q_THD.size(2) <= kMaxHeadDim &&
        kv_SD.size(0) == kI_SD.size(0) &&
        (lse_TH.shape == Shape{tokens, q_THD.size(1)}) &&
        (loss_T.shape == Shape{tokens}) && dense_rows(q_THD) &&
        dense_rows(kv_SD))
      << "[indexer_loss] attention: q is " << describe(q_THD) << ", kv is "
      << describe(kv_SD) << ", lse is " << describe(lse_TH) << ", loss is "
      << describe(loss_T) << " for indexer keys " << describe(kI_SD);
  CHECK(target_TK.data == nullptr ||
        (target_TK.shape == ids_TK.shape && dense_rows(target_TK)))
      << "[indexer_loss] target is " << describe(target_TK) << ", ids is "
      << describe(ids_TK);
  if (kCuda && l.on_cuda()) {
    return cuda::indexer_loss_forward<T>(l, qI_THD, kI_SD, w_TH, index_scale,
                                         q_THD, kv_SD, lse_TH, attention_scale,
                                         ids_TK, loss_T, dscore_TK, target_TK);
  }
  l.threads->parallel_for(
      tokens, kQueriesPerChunk, [&](int64_t begin, int64_t end) {
        Row<A> row;
        A buffer[kKeyTile * kMaxHeadDim];
        for (int64_t t = begin; t < end; ++t) {
          const int32_t* ids = ids_TK.data + t * ids_TK.strides[0];
          check_ids("indexer_loss", ids, slots, kI_SD.size(0));
          row.count = 0;
          visit_selected(ids, slots, [&](const Selected& tile) {
            index_scores<T>(qI_THD, w_TH, t, A(index_scale),
                            gather(kI_SD, tile, buffer), tile.count,
                            row.score + row.count);
            sum_probabilities<T>(q_THD, lse_TH, t, A(attention_scale),
                                 gather(kv_SD, tile, buffer), tile.count,
                                 row.target + row.count);
            std::copy_n(tile.slot, tile.count, row.slot + row.count);
            row.count += tile.count;
          });
          normalise(row.target, row.count, q_THD.size(1));
          if (target_TK.data != nullptr) {
            A* target = target_TK.data + t * target_TK.strides[0];
            std::fill_n(target, slots, A(0));
            for (int64_t j = 0; j < row.count; ++j) {
              target[row.slot[j]] = row.target[j];
            }
          }
          kl_row(row, slots, &loss_T(t),
                 dscore_TK.data + t * dscore_TK.strides[0]);
        }
      });
}

template <class A>
void indexer_kl(Launch l, View<const A> scores_TK, View<const A> target_TK,
                View<const int32_t> ids_TK, View<A> loss_T, View<A> dscore_TK) {
  if (l.dry) return;
  CHECK(ids_TK.rank() == 2 && scores_TK.shape == ids_TK.shape &&
        target_TK.shape == ids_TK.shape && dscore_TK.shape == ids_TK.shape &&
        (loss_T.shape == Shape{ids_TK.size(0)}) &&
        ids_TK.size(1) <= kMaxSelected && dense_rows(dscore_TK))
      << "[indexer_kl] shapes: scores is " << describe(scores_TK)
      << ", target is " << describe(target_TK) << ", ids is "
      << describe(ids_TK) << ", loss is " << describe(loss_T) << ", dscore is "
      << describe(dscore_TK);
  if (kCuda && l.on_cuda()) {
    return cuda::indexer_kl(l, scores_TK, target_TK, ids_TK, loss_T, dscore_TK);
  }
  const int64_t slots = ids_TK.size(1);
  l.threads->parallel_for(ids_TK.size(0), rows_per_chunk(slots),
                          [&](int64_t begin, int64_t end) {
                            Row<A> row;
                            for (int64_t t = begin; t < end; ++t) {
                              row.count = 0;
                              for (int64_t j = 0; j < slots; ++j) {
                                if (ids_TK(t, j) < 0) continue;
                                row.score[row.count] = scores_TK(t, j);
                                row.target[row.count] = target_TK(t, j);
                                row.slot[row.count++] = static_cast<int32_t>(j);
                              }
                              kl_row(row, slots, &loss_T(t),
                                     dscore_TK.data + t * dscore_TK.strides[0]);
                            }
                          });
}

template <class T>
size_t indexer_loss_backward_workspace_bytes(const Launch& l,
                                             const View<const T>& qI_THD,
                                             const View<const T>& kI_SD,
                                             const View<const int32_t>& ids_TK,
                                             double index_scale) {
  if (kCuda && l.on_cuda()) {
    return cuda::indexer_loss_backward_workspace_bytes<T>(qI_THD, kI_SD, ids_TK,
                                                          index_scale);
  }
  return 0;
}

template <class T>
void indexer_loss_backward(Launch l, View<const Accumulator<T>> dscore_TK,
                           View<const Accumulator<T>> dloss_T,
                           View<const T> qI_THD, View<const T> kI_SD,
                           View<const Accumulator<T>> w_TH, double index_scale,
                           View<const int32_t> ids_TK,
                           View<const int32_t> inverse_offsets_S1,
                           View<const int32_t> inverse_entries, View<T> dqI_THD,
                           View<T> dkI_SD, View<Accumulator<T>> dw_TH,
                           std::byte* workspace) {
  if (l.dry) return;
  using A = Accumulator<T>;
  check_indexer<T>("indexer_loss", qI_THD, kI_SD, w_TH, ids_TK, dscore_TK);
  const int64_t tokens = qI_THD.size(0), keys = kI_SD.size(0);
  CHECK((dloss_T.shape == Shape{tokens}) && dqI_THD.shape == qI_THD.shape &&
        dkI_SD.shape == kI_SD.shape && dw_TH.shape == w_TH.shape &&
        dense_rows(dqI_THD) && dense_rows(dkI_SD))
      << "[indexer_loss] gradients: dloss is " << describe(dloss_T)
      << ", dq is " << describe(dqI_THD) << ", dk is " << describe(dkI_SD)
      << ", dw is " << describe(dw_TH);
  const auto inverse = [&] {
    return "offsets is " + describe(inverse_offsets_S1) + ", entries is " +
           describe(inverse_entries) + " for k " + describe(kI_SD);
  };
  CHECK((inverse_offsets_S1.shape == Shape{keys + 1}) &&
        inverse_entries.rank() == 1)
      << "[indexer_loss] inverse: " << inverse();
  if (kCuda && l.on_cuda()) {
    return cuda::indexer_loss_backward<T>(
        l, dscore_TK, dloss_T, qI_THD, kI_SD, w_TH, index_scale, ids_TK,
        inverse_offsets_S1, inverse_entries, dqI_THD, dkI_SD, dw_TH, workspace);
  }
  CHECK_LE(inverse_offsets_S1(keys), inverse_entries.size(0))
      << "[indexer_loss] inverse: " << inverse();
  const Backward<T> backward{dscore_TK,
                             dloss_T,
                             qI_THD,
                             kI_SD,
                             w_TH,
                             A(index_scale),
                             ids_TK,
                             inverse_offsets_S1,
                             inverse_entries,
                             dqI_THD,
                             dkI_SD,
                             dw_TH};
  l.threads->parallel_for(
      tokens, kQueriesPerChunk, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          check_ids("indexer_loss", ids_TK.data + t * ids_TK.strides[0],
                    ids_TK.size(1), keys);
          backward.query(t);
        }
      });
  l.threads->parallel_for(keys, kKeysPerChunk, [&](int64_t begin, int64_t end) {
    backward.keys(begin, end);
  });
}

template <class T>
Cost indexer_loss_forward_cost(int64_t tokens, int64_t index_heads,
                               int64_t index_dim, int64_t heads, int64_t dim,
                               int64_t selected) {
  const double pairs = static_cast<double>(tokens) * selected;
  const double width = index_heads * index_dim + heads * dim;
  return {2 * pairs * width,
          pairs * ((index_dim + dim) * sizeof(T) + 4 + sizeof(Accumulator<T>)) +
              tokens * width * sizeof(T)};
}

// Three products: scores, dq and dk; this one computes the scores twice.
template <class T>
Cost indexer_loss_backward_cost(int64_t tokens, int64_t index_heads,
                                int64_t index_dim, int64_t selected) {
  const double pairs = static_cast<double>(tokens) * selected;
  const double width = index_heads * index_dim;
  return {6 * pairs * width,
          pairs * (2 * index_dim * sizeof(T) + 8 + sizeof(Accumulator<T>)) +
              2 * tokens * width * sizeof(T)};
}

#define TAPELINE_INDEXER_LOSS(T)                                               \
  template void indexer_loss_forward<T>(                                       \
      Launch, View<const T>, View<const T>, View<const Accumulator<T>>,        \
      double, View<const T>, View<const T>, View<const Accumulator<T>>,        \
      double, View<const int32_t>, View<Accumulator<T>>, View<Accumulator<T>>, \
      View<Accumulator<T>>);                                                   \
  template void indexer_loss_backward<T>(                                      \
      Launch, View<const Accumulator<T>>, View<const Accumulator<T>>,          \
      View<const T>, View<const T>, View<const Accumulator<T>>, double,        \
      View<const int32_t>, View<const int32_t>, View<const int32_t>, View<T>,  \
      View<T>, View<Accumulator<T>>, std::byte*);                              \
  template size_t indexer_loss_backward_workspace_bytes<T>(                    \
      const Launch&, const View<const T>&, const View<const T>&,               \
      const View<const int32_t>&, double);                                     \
  template Cost indexer_loss_forward_cost<T>(int64_t, int64_t, int64_t,        \
                                             int64_t, int64_t, int64_t);       \
  template Cost indexer_loss_backward_cost<T>(int64_t, int64_t, int64_t,       \
                                              int64_t);
TAPELINE_INDEXER_LOSS(float)
TAPELINE_INDEXER_LOSS(bf16)
TAPELINE_INDEXER_LOSS(double)
#undef TAPELINE_INDEXER_LOSS

template void indexer_kl<float>(Launch, View<const float>, View<const float>,
                                View<const int32_t>, View<float>, View<float>);
template void indexer_kl<double>(Launch, View<const double>, View<const double>,
                                 View<const int32_t>, View<double>,
                                 View<double>);

}  // namespace tapeline
