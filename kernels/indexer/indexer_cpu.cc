#include <algorithm>
#include <limits>

#include "kernels/attention/rows.h"
#include "kernels/cuda_dispatch.h"
#include "kernels/indexer/index_scores.h"
#include "kernels/indexer/indexer.h"
#include "kernels/indexer/indexer_cuda.h"
#include "kernels/top_k/top_k.h"

namespace tapeline {
namespace {

using internal::converted;
using internal::index_scores;
using internal::kConverted;
using internal::kKeyTile;
using internal::Rows;

// Queries that share a tile of keys while it is in the cache.
constexpr int64_t kQueriesPerChunk = 8;
// Rows of scores that indexer_select holds: enough chunks for many threads, or
// blocks for all processors of a GPU.
int64_t rows_in_workspace(const Launch& l, int64_t tokens) {
  return std::min<int64_t>(tokens, l.on_cuda() ? 512 : 128);
}

template <class T>
struct Indexer {
  using A = Accumulator<T>;
  View<const T> q, k;
  View<const A> w;
  KeyRange range;
  A scale;
  int64_t tokens = q.size(0), heads = q.size(1), dim = q.size(2);
  int64_t keys = k.size(0);

  // Rows [first, last), within their ranges only; row t at scores [t - first].
  void score_rows(int64_t first, int64_t last, const View<A>& scores) const {
    A k_buffer[kConverted<T, kKeyTile>];
    int64_t begin = keys, end = 0;
    for (int64_t t = first; t < last; ++t) {
      if (range.begin(t) >= range.end(t)) continue;
      begin = std::min<int64_t>(begin, range.begin(t));
      end = std::max<int64_t>(end, range.end(t));
    }
    for (int64_t key = begin; key < end; key += kKeyTile) {
      const int64_t n = std::min<int64_t>(kKeyTile, end - key);
      const T* from = k.data + key * k.strides[0];
      const Rows<const A> key_rows =
          converted<T>({from, k.strides[0]}, n, dim, k_buffer);
      for (int64_t t = first; t < last; ++t) {
        const int64_t lo = std::max<int64_t>(key, range.begin(t));
        const int64_t hi = std::min<int64_t>(key + n, range.end(t));
        if (lo >= hi) continue;
        index_scores(q, w, t, scale, key_rows.from(lo - key), hi - lo,
                     &scores(t - first, lo));
      }
    }
  }

  void check(const char* op) const {
    CHECK(q.rank() == 3 && k.rank() == 2 && q.size(2) == k.size(1) &&
          (w.shape == Shape{tokens, heads}) && dense_rows(q) && dense_rows(k))
        << "[" << op << "] shapes: q is " << describe(q) << ", k is "
        << describe(k) << ", w is " << describe(w);
    CHECK(dim <= kMaxHeadDim) << "[" << op << "] heads wider than "
                              << kMaxHeadDim << ": q is " << describe(q);
    check_key_range_shapes(op, range, tokens);
  }
};

}  // namespace

template <class T>
void indexer_scores(Launch l, View<const T> q_THD, View<const T> k_SD,
                    View<const Accumulator<T>> w_TH, KeyRange range,
                    double scale, View<Accumulator<T>> scores_TS) {
  if (l.dry) return;
  using A = Accumulator<T>;
  const Indexer<T> indexer{q_THD, k_SD, w_TH, range, A(scale)};
  indexer.check("indexer_scores");
  CHECK((scores_TS.shape == Shape{indexer.tokens, indexer.keys}) &&
        dense_rows(scores_TS))
      << "[indexer_scores] shapes: q is " << describe(q_THD) << ", k is "
      << describe(k_SD) << ", scores is " << describe(scores_TS);
  if (kCuda && l.on_cuda()) {
    return cuda::indexer_scores<T>(l, q_THD, k_SD, w_TH, range, scale,
                                   scores_TS);
  }
  check_key_ranges("indexer_scores", range, indexer.tokens, indexer.keys);
  l.threads->parallel_for(
      indexer.tokens, kQueriesPerChunk, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t) {
          std::fill_n(scores_TS.data + t * scores_TS.strides[0], indexer.keys,
                      -std::numeric_limits<A>::infinity());
        }
        indexer.score_rows(first, last, scores_TS.slice(0, first, last));
      });
}

template <class T>
size_t indexer_select_workspace_bytes(const Launch& l, int64_t tokens,
                                      int64_t keys) {
  return static_cast<size_t>(rows_in_workspace(l, tokens) * keys) *
         sizeof(Accumulator<T>);
}

template <class T>
void indexer_select(Launch l, View<const T> q_THD, View<const T> k_SD,
                    View<const Accumulator<T>> w_TH, KeyRange range,
                    double scale, int selected, View<int32_t> ids_TK,
                    std::byte* workspace) {
  if (l.dry) return;
  using A = Accumulator<T>;
  const Indexer<T> indexer{q_THD, k_SD, w_TH, range, A(scale)};
  indexer.check("indexer_select");
  CHECK((ids_TK.shape == Shape{indexer.tokens, selected}))
      << "[indexer_select] shapes: q is " << describe(q_THD) << ", ids is "
      << describe(ids_TK) << ", selected is " << selected;
  const int64_t most = rows_in_workspace(l, indexer.tokens);
  if (kCuda && l.on_cuda()) {
    return cuda::indexer_select<T>(l, q_THD, k_SD, w_TH, range, scale, selected,
                                   ids_TK, workspace, most);
  }
  check_key_ranges("indexer_select", range, indexer.tokens, indexer.keys);
  for (int64_t row = 0; row < indexer.tokens; row += most) {
    const int64_t rows = std::min(most, indexer.tokens - row);
    const View<A> scores(reinterpret_cast<A*>(workspace), {rows, indexer.keys});
    l.threads->parallel_for(
        rows, kQueriesPerChunk, [&](int64_t first, int64_t last) {
          const View<A> mine = scores.slice(0, first, last);
          indexer.score_rows(row + first, row + last, mine);
          // Inside a chunk this runs on this thread.
          top_k<A>(l, mine,
                   {range.begin.slice(0, row + first, row + last),
                    range.end.slice(0, row + first, row + last)},
                   selected, ids_TK.slice(0, row + first, row + last));
        });
  }
}

template <class T>
Cost indexer_scores_cost(int64_t tokens, int64_t keys, int64_t heads,
                         int64_t dim, int64_t pairs) {
  const double t = static_cast<double>(tokens);
  return {2.0 * pairs * heads * (dim + 1),
          (t * heads + keys) * dim * sizeof(T) +
              t * (heads + keys) * sizeof(Accumulator<T>)};
}

template <class T>
Cost indexer_select_cost(int64_t tokens, int64_t keys, int64_t heads,
                         int64_t dim, int64_t pairs, int64_t selected) {
  const double t = static_cast<double>(tokens);
  return {2.0 * pairs * heads * (dim + 1),
          (t * heads + keys) * dim * sizeof(T) +
              t * (heads * sizeof(Accumulator<T>) + selected * 4)};
}

#define TAPELINE_INDEXER(T)                                                 \
  template void indexer_scores<T>(Launch, View<const T>, View<const T>,     \
                                  View<const Accumulator<T>>, KeyRange,     \
                                  double, View<Accumulator<T>>);            \
  template void indexer_select<T>(Launch, View<const T>, View<const T>,     \
                                  View<const Accumulator<T>>, KeyRange,     \
                                  double, int, View<int32_t>, std::byte*);  \
  template size_t indexer_select_workspace_bytes<T>(const Launch&, int64_t, \
                                                    int64_t);               \
  template Cost indexer_scores_cost<T>(int64_t, int64_t, int64_t, int64_t,  \
                                       int64_t);                            \
  template Cost indexer_select_cost<T>(int64_t, int64_t, int64_t, int64_t,  \
                                       int64_t, int64_t);
TAPELINE_INDEXER(float)
TAPELINE_INDEXER(bf16)
TAPELINE_INDEXER(double)
#undef TAPELINE_INDEXER

}  // namespace tapeline
