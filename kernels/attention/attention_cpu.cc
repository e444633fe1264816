// Tiles of kRowTile rows (row_tile.h) by kKeyTile keys, which start at
// multiples of kKeyTile. A row is one (query, head) pair of one group: row r of
// group g is head g (H/G) + r % (H/G) of query r / (H/G).
#include <algorithm>

#include "kernels/attention/attention.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/row_tile.h"
#include "kernels/attention/rows.h"
#include "kernels/attention/running_softmax.h"
#include "kernels/attention/tile.h"
#include "kernels/cuda_dispatch.h"

namespace tapeline {
namespace {

using internal::add_product;
using internal::converted;
using internal::dots;
using internal::kConverted;
using internal::kKeyTile;
using internal::kRowTile;
using internal::plain;
using internal::row_tile;
using internal::Rows;
using internal::RowTile;
using internal::RunningSoftmax;
using internal::Span;
using internal::transposed;
using internal::visit_rectangles;

// One call's shapes and the addressing of a group's rows.
template <class T>
struct Problem {
  using A = Accumulator<T>;
  View<const T> q, k, v;
  KeyRange range;
  A scale;
  int64_t heads = q.size(1), groups = k.size(1), ratio = heads / groups;
  int64_t dim = q.size(2), v_dim = v.size(2), keys = k.size(0);
  int64_t rows = q.size(0) * ratio;
  int64_t row_tiles = ceil_div(rows, kRowTile);
  int64_t key_tiles = ceil_div(keys, kKeyTile);

  // Element (query, head) of row r of group g in x [T, H, ...].
  template <class U>
  U* at(const View<U>& x, int64_t g, int64_t r) const {
    return x.data + r / ratio * x.strides[0] +
           (g * ratio + r % ratio) * x.strides[1];
  }
  // The tile's rows of x [T, H, n], side by side.
  Rows<A> gather(const View<const T>& x, int64_t g, const RowTile& tile,
                 A* buffer) const {
    const int64_t n = x.size(2);
    for (int m = 0; m < tile.rows; ++m) {
      convert(at(x, g, tile.first + m), buffer + m * n, n);
    }
    return {buffer, n};
  }
  // Keys [key, key + n) of group g in x = k or v.
  Rows<const A> key_rows(const View<const T>& x, int64_t g, int64_t key,
                         int64_t n, A* buffer) const {
    const T* from = x.data + key * x.strides[0] + g * x.strides[1];
    return converted<T>({from, x.strides[0]}, n, x.size(2), buffer);
  }
};

template <class T>
void check_shapes(const Problem<T>& p, const View<const T>& o,
                  const View<const Accumulator<T>>& lse) {
  const View<const T>&q = p.q, &k = p.k, &v = p.v;
  CHECK(q.rank() == 3 && k.rank() == 3 && v.rank() == 3 &&
        q.size(2) == k.size(2) && k.size(0) == v.size(0) &&
        k.size(1) == v.size(1) && k.size(1) > 0 && q.size(1) % k.size(1) == 0)
      << "[attention] shapes: q is " << describe(q) << ", k is " << describe(k)
      << ", v is " << describe(v);
  CHECK(q.size(2) <= kMaxHeadDim && v.size(2) <= kMaxHeadDim)
      << "[attention] heads wider than " << kMaxHeadDim << ": q is "
      << describe(q) << ", v is " << describe(v);
  CHECK((o.shape == Shape{q.size(0), q.size(1), v.size(2)}) &&
        (lse.shape == Shape{q.size(0), q.size(1)}))
      << "[attention] shapes: q is " << describe(q) << ", v is " << describe(v)
      << ", o is " << describe(o) << ", lse is " << describe(lse);
  CHECK(dense_rows(q) && dense_rows(k) && dense_rows(v) && dense_rows(o))
      << "[attention] last strides must be 1: q is " << describe(q) << ", k is "
      << describe(k) << ", v is " << describe(v) << ", o is " << describe(o);
  check_key_range_shapes("attention", p.range, q.size(0));
}

template <class F>
void for_each_tile(Launch l, int64_t groups, int64_t tiles, F f) {
  l.threads->parallel_for(groups * tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i / tiles, i % tiles);
  });
}

template <class T>
void forward_tile(const Problem<T>& p, int64_t g, int64_t tile_index,
                  const View<T>& o, const View<Accumulator<T>>& lse) {
  using A = Accumulator<T>;
  const RowTile tile = row_tile(p.range, p.ratio, tile_index, p.rows);
  A q_buffer[kRowTile * kMaxHeadDim], o_buffer[kRowTile * kMaxHeadDim];
  A k_buffer[kConverted<T, kKeyTile>], v_buffer[kConverted<T, kKeyTile>];
  A score_buffer[kRowTile * kKeyTile];
  const Rows<A> score{score_buffer, kKeyTile};
  const Rows<A> sum_pv{o_buffer, p.v_dim};
  const Rows<const A> q = p.gather(p.q, g, tile, q_buffer);
  std::fill_n(o_buffer, tile.rows * p.v_dim, A(0));
  RunningSoftmax<A> softmax[kRowTile];

  for (int64_t key = tile.min_begin / kKeyTile * kKeyTile; key < tile.max_end;
       key += kKeyTile) {
    const int n = static_cast<int>(std::min<int64_t>(kKeyTile, p.keys - key));
    const Rows<const A> k = p.key_rows(p.k, g, key, n, k_buffer);
    const Rows<const A> v = p.key_rows(p.v, g, key, n, v_buffer);
    Span span[kRowTile];
    for (int m = 0; m < tile.rows; ++m) span[m] = tile.span(m, key, n);
    visit_rectangles(span, tile.rows, [&](int m, int count, Span s) {
      dots(count, s.end - s.begin, p.dim, q.from(m), k.from(s.begin),
           score.from(m, s.begin));
    });
    for (int m = 0; m < tile.rows; ++m) {
      if (span[m].empty()) continue;
      const A shrink = softmax[m].add(score[m] + span[m].begin,
                                      span[m].end - span[m].begin, p.scale);
#pragma omp simd
      for (int64_t i = 0; i < p.v_dim; ++i) sum_pv[m][i] *= shrink;
    }
    visit_rectangles(span, tile.rows, [&](int m, int count, Span s) {
      add_product(count, p.v_dim, s.end - s.begin,
                  plain(score.from(m, s.begin)), v.from(s.begin),
                  sum_pv.from(m));
    });
  }

  for (int m = 0; m < tile.rows; ++m) {
    const A inverse = softmax[m].inverse();
    T* out = p.at(o, g, tile.first + m);
#pragma omp simd
    for (int64_t i = 0; i < p.v_dim; ++i) store(out[i], sum_pv[m][i] * inverse);
    *p.at(lse, g, tile.first + m) = softmax[m].lse();
  }
}

// A row tile with what its gradients need.
template <class T>
struct GradientRows {
  using A = Accumulator<T>;
  RowTile tile;
  Span span[kRowTile];               // within the current key tile
  A lse[kRowTile], delta[kRowTile];  // delta = do . o
  A q_buffer[kRowTile * kMaxHeadDim], do_buffer[kRowTile * kMaxHeadDim];
  A p_buffer[kRowTile * kKeyTile], ds_buffer[kRowTile * kKeyTile];
  Rows<const A> q, dout;
  Rows<A> p{p_buffer, kKeyTile}, ds{ds_buffer, kKeyTile};

  void load(const Problem<T>& problem, int64_t g, const View<const T>& do_THV,
            const View<const T>& o_THV, const View<const A>& lse_TH) {
    q = problem.gather(problem.q, g, tile, q_buffer);
    dout = problem.gather(do_THV, g, tile, do_buffer);
    for (int m = 0; m < tile.rows; ++m) {
      const int64_t r = tile.first + m;
      lse[m] = *problem.at(lse_TH, g, r);
      delta[m] =
          dot(problem.at(do_THV, g, r), problem.at(o_THV, g, r), problem.v_dim);
    }
  }

  // p and scale * ds of the pairs in range among n keys from `key`.
  void score(const Problem<T>& problem, int64_t key, int n, Rows<const A> k,
             Rows<const A> v) {
    for (int m = 0; m < tile.rows; ++m) span[m] = tile.span(m, key, n);
    visit_rectangles(span, tile.rows, [&](int m, int count, Span s) {
      const int keys = s.end - s.begin;
      dots(count, keys, problem.dim, q.from(m), k.from(s.begin),
           p.from(m, s.begin));
      dots(count, keys, problem.v_dim, dout.from(m), v.from(s.begin),
           ds.from(m, s.begin));
    });
    for (int m = 0; m < tile.rows; ++m) {
      A* pm = p[m];
      A* dsm = ds[m];
#pragma omp simd
      for (int j = span[m].begin; j < span[m].end; ++j) {
        pm[j] = exp_simd(pm[j] * problem.scale - lse[m]);
        dsm[j] = pm[j] * (dsm[j] - delta[m]) * problem.scale;
      }
    }
  }
};

// The gradients of one call; each tile of them is written by one chunk.
template <class T>
struct Backward {
  using A = Accumulator<T>;
  static constexpr int kBuffer = kConverted<T, kKeyTile>;
  const Problem<T>& p;
  View<const T> dout, o;
  View<const A> lse;
  View<T> dq, dk, dv;

  // dq of one row tile: keys in ascending order.
  void queries(int64_t g, int64_t tile_index) const {
    GradientRows<T> rows;
    rows.tile = row_tile(p.range, p.ratio, tile_index, p.rows);
    rows.load(p, g, dout, o, lse);
    A buffer[kRowTile * kMaxHeadDim], k_buffer[kBuffer], v_buffer[kBuffer];
    const Rows<A> sum{buffer, p.dim};
    std::fill_n(buffer, rows.tile.rows * p.dim, A(0));
    for (int64_t key = rows.tile.min_begin / kKeyTile * kKeyTile;
         key < rows.tile.max_end; key += kKeyTile) {
      const int n = static_cast<int>(std::min<int64_t>(kKeyTile, p.keys - key));
      const Rows<const A> k = p.key_rows(p.k, g, key, n, k_buffer);
      rows.score(p, key, n, k, p.key_rows(p.v, g, key, n, v_buffer));
      visit_rectangles(rows.span, rows.tile.rows,
                       [&](int m, int count, Span s) {
                         add_product(count, p.dim, s.end - s.begin,
                                     plain(rows.ds.from(m, s.begin)),
                                     k.from(s.begin), sum.from(m));
                       });
    }
    for (int m = 0; m < rows.tile.rows; ++m) {
      convert(sum[m], p.at(dq, g, rows.tile.first + m), p.dim);
    }
  }

  // dk and dv of one key tile: rows in ascending order.
  void keys(int64_t g, int64_t tile_index) const {
    const int64_t key = tile_index * kKeyTile;
    const int n = static_cast<int>(std::min<int64_t>(kKeyTile, p.keys - key));
    GradientRows<T> rows;
    A dk_buffer[kKeyTile * kMaxHeadDim], dv_buffer[kKeyTile * kMaxHeadDim];
    A k_buffer[kBuffer], v_buffer[kBuffer];
    const Rows<A> dk_sum{dk_buffer, p.dim}, dv_sum{dv_buffer, p.v_dim};
    std::fill_n(dk_buffer, n * p.dim, A(0));
    std::fill_n(dv_buffer, n * p.v_dim, A(0));
    const Rows<const A> k = p.key_rows(p.k, g, key, n, k_buffer);
    const Rows<const A> v = p.key_rows(p.v, g, key, n, v_buffer);
    for (int64_t i = 0; i < p.row_tiles; ++i) {
      rows.tile = row_tile(p.range, p.ratio, i, p.rows);
      if (rows.tile.max_end <= key || rows.tile.min_begin >= key + n) continue;
      rows.load(p, g, dout, o, lse);
      rows.score(p, key, n, k, v);
      visit_rectangles(rows.span, rows.tile.rows,
                       [&](int m, int count, Span s) {
                         const int seen = s.end - s.begin;
                         add_product(seen, p.dim, count,
                                     transposed(rows.ds.from(m, s.begin)),
                                     rows.q.from(m), dk_sum.from(s.begin));
                         add_product(seen, p.v_dim, count,
                                     transposed(rows.p.from(m, s.begin)),
                                     rows.dout.from(m), dv_sum.from(s.begin));
                       });
    }
    for (int64_t j = 0; j < n; ++j) {
      convert(dk_sum[j], &dk(key + j, g, 0), p.dim);
      convert(dv_sum[j], &dv(key + j, g, 0), p.v_dim);
    }
  }
};

}  // namespace

template <class T>
void attention_forward(Launch l, View<const T> q_THD, View<const T> k_SGD,
                       View<const T> v_SGV, KeyRange range, double scale,
                       View<T> o_THV, View<Accumulator<T>> lse_TH) {
  if (l.dry) return;
  const Problem<T> p{q_THD, k_SGD, v_SGV, range, Accumulator<T>(scale)};
  check_shapes<T>(p, o_THV, lse_TH);
  if (kCuda && l.on_cuda()) {
    return cuda::attention_forward<T>(l, q_THD, k_SGD, v_SGV, range, scale,
                                      o_THV, lse_TH);
  }
  check_key_ranges("attention", range, q_THD.size(0), p.keys);
  for_each_tile(l, p.groups, p.row_tiles, [&](int64_t g, int64_t tile) {
    forward_tile(p, g, tile, o_THV, lse_TH);
  });
}

template <class T>
size_t attention_backward_workspace_bytes(
    const Launch& l, const View<const T>& q_THD, const View<const T>& k_SGD,
    const View<const T>& v_SGV, const View<const T>& o_THV, double scale) {
  if (kCuda && l.on_cuda()) {
    return cuda::attention_backward_workspace_bytes<T>(q_THD, k_SGD, v_SGV,
                                                       o_THV, scale);
  }
  return 0;
}

template <class T>
void attention_backward(Launch l, View<const T> do_THV, View<const T> q_THD,
                        View<const T> k_SGD, View<const T> v_SGV,
                        View<const T> o_THV, View<const Accumulator<T>> lse_TH,
                        KeyRange range, double scale, View<T> dq_THD,
                        View<T> dk_SGD, View<T> dv_SGV, std::byte* workspace) {
  if (l.dry) return;
  const Problem<T> p{q_THD, k_SGD, v_SGV, range, Accumulator<T>(scale)};
  check_shapes<T>(p, o_THV, lse_TH);
  CHECK(do_THV.shape == o_THV.shape && dq_THD.shape == q_THD.shape &&
        dk_SGD.shape == k_SGD.shape && dv_SGV.shape == v_SGV.shape &&
        dense_rows(do_THV) && dense_rows(dq_THD) && dense_rows(dk_SGD) &&
        dense_rows(dv_SGV))
      << "[attention] gradients: do is " << describe(do_THV) << ", dq is "
      << describe(dq_THD) << ", dk is " << describe(dk_SGD) << ", dv is "
      << describe(dv_SGV);
  if (kCuda && l.on_cuda()) {
    return cuda::attention_backward<T>(l, do_THV, q_THD, k_SGD, v_SGV, o_THV,
                                       lse_TH, range, scale, dq_THD, dk_SGD,
                                       dv_SGV, workspace);
  }
  check_key_ranges("attention", range, q_THD.size(0), p.keys);
  const Backward<T> backward{p, do_THV, o_THV, lse_TH, dq_THD, dk_SGD, dv_SGV};
  for_each_tile(l, p.groups, p.row_tiles,
                [&](int64_t g, int64_t tile) { backward.queries(g, tile); });
  for_each_tile(l, p.groups, p.key_tiles,
                [&](int64_t g, int64_t tile) { backward.keys(g, tile); });
}

template <class T>
Cost attention_forward_cost(int64_t tokens, int64_t keys, int64_t heads,
                            int64_t groups, int64_t qk_dim, int64_t v_dim,
                            int64_t pairs) {
  const double rows = static_cast<double>(tokens) * heads * (qk_dim + v_dim);
  const double kv = static_cast<double>(keys) * groups * (qk_dim + v_dim);
  return {2.0 * pairs * heads * (qk_dim + v_dim),
          (rows + kv) * sizeof(T) +
              static_cast<double>(tokens) * heads * sizeof(Accumulator<T>)};
}

// The five products a backward needs; this one computes two of them twice.
template <class T>
Cost attention_backward_cost(int64_t tokens, int64_t keys, int64_t heads,
                             int64_t groups, int64_t qk_dim, int64_t v_dim,
                             int64_t pairs) {
  const double rows = static_cast<double>(tokens) * heads * (qk_dim + v_dim);
  const double kv = static_cast<double>(keys) * groups * (qk_dim + v_dim);
  return {2.0 * pairs * heads * (3 * qk_dim + 2 * v_dim),
          2 * (rows + kv) * sizeof(T) +
              static_cast<double>(tokens) * heads *
                  (v_dim * sizeof(T) + sizeof(Accumulator<T>))};
}

#define TAPELINE_ATTENTION(T)                                                  \
  template void attention_forward<T>(Launch, View<const T>, View<const T>,     \
                                     View<const T>, KeyRange, double, View<T>, \
                                     View<Accumulator<T>>);                    \
  template size_t attention_backward_workspace_bytes<T>(                       \
      const Launch&, const View<const T>&, const View<const T>&,               \
      const View<const T>&, const View<const T>&, double);                     \
  template void attention_backward<T>(                                         \
      Launch, View<const T>, View<const T>, View<const T>, View<const T>,      \
      View<const T>, View<const Accumulator<T>>, KeyRange, double, View<T>,    \
      View<T>, View<T>, std::byte*);                                           \
  template Cost attention_forward_cost<T>(int64_t, int64_t, int64_t, int64_t,  \
                                          int64_t, int64_t, int64_t);          \
  template Cost attention_backward_cost<T>(int64_t, int64_t, int64_t, int64_t, \
                                           int64_t, int64_t, int64_t);
TAPELINE_ATTENTION(float)
TAPELINE_ATTENTION(bf16)
TAPELINE_ATTENTION(double)
#undef TAPELINE_ATTENTION

}  // namespace tapeline
