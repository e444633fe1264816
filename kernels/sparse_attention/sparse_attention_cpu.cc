// A query's keys are gathered in tiles; heads are taken kRowTile at a time, so
// that a tile and what belongs to it fit the cache.
#include <algorithm>

#include "kernels/attention/rows.h"
#include "kernels/attention/running_softmax.h"
#include "kernels/attention/tile.h"
#include "kernels/cuda_dispatch.h"
#include "kernels/sparse_attention/selected.h"
#include "kernels/sparse_attention/sparse_attention.h"
#include "kernels/sparse_attention/sparse_attention_cuda.h"

namespace tapeline {
namespace {

using internal::add_product;
using internal::check_ids;
using internal::dots;
using internal::Factor;
using internal::gather;
using internal::heads_of;
using internal::kConverted;
using internal::kKeysPerChunk;
using internal::kKeyTile;
using internal::kRowTile;
using internal::plain;
using internal::Rows;
using internal::RunningSoftmax;
using internal::Selected;
using internal::visit_entries;
using internal::visit_selected;

constexpr int64_t kQueriesPerChunk = 4;  // some microseconds of work each

template <class T>
void check_shapes(const View<const T>& q, const View<const T>& kv,
                  const View<const int32_t>& ids, const View<const T>& o,
                  const View<const Accumulator<T>>& lse) {
  CHECK(q.rank() == 3 && kv.rank() == 2 && ids.rank() == 2 && o.rank() == 3 &&
        q.size(2) == kv.size(1) && ids.size(0) == q.size(0) &&
        o.size(0) == q.size(0) && o.size(1) == q.size(1) &&
        o.size(2) <= q.size(2) && (lse.shape == Shape{q.size(0), q.size(1)}))
      << "[sparse_attention] shapes: q is " << describe(q) << ", kv is "
      << describe(kv) << ", ids is " << describe(ids) << ", o is "
      << describe(o) << ", lse is " << describe(lse);
  CHECK(q.size(2) <= kMaxHeadDim) << "[sparse_attention] heads wider than "
                                  << kMaxHeadDim << ": q is " << describe(q);
  CHECK(dense_rows(q) && dense_rows(kv) && dense_rows(ids) && dense_rows(o))
      << "[sparse_attention] last strides must be 1: q is " << describe(q)
      << ", kv is " << describe(kv) << ", ids is " << describe(ids) << ", o is "
      << describe(o);
}

template <class T>
void forward_row(int64_t t, const View<const T>& q_THD,
                 const View<const T>& kv_SD, const int32_t* ids, int64_t k,
                 Accumulator<T> scale, const View<T>& o_THV,
                 const View<Accumulator<T>>& lse_TH) {
  using A = Accumulator<T>;
  const int64_t heads = q_THD.size(1), dim = q_THD.size(2);
  const int64_t v_dim = o_THV.size(2);
  A q_buffer[kConverted<T, kRowTile>], kv_buffer[kKeyTile * kMaxHeadDim];
  A o_buffer[kRowTile * kMaxHeadDim], score_buffer[kRowTile * kKeyTile];
  const Rows<A> score{score_buffer, kKeyTile}, sum_pv{o_buffer, v_dim};
  for (int64_t h = 0; h < heads; h += kRowTile) {
    const int64_t n = std::min<int64_t>(kRowTile, heads - h);
    const Rows<const A> q = heads_of(q_THD, t, h, n, q_buffer);
    RunningSoftmax<A> softmax[kRowTile];
    std::fill_n(o_buffer, n * v_dim, A(0));
    visit_selected(ids, k, [&](const Selected& tile) {
      const Rows<const A> kv = gather(kv_SD, tile, kv_buffer);
      dots(n, tile.count, dim, q, kv, score);
      for (int64_t m = 0; m < n; ++m) {
        const A shrink = softmax[m].add(score[m], tile.count, scale);
#pragma omp simd
        for (int64_t i = 0; i < v_dim; ++i) sum_pv[m][i] *= shrink;
      }
      add_product(n, v_dim, tile.count, plain(score), kv, sum_pv);
    });
    for (int64_t m = 0; m < n; ++m) {
      const A inverse = softmax[m].inverse();
      T* out = &o_THV(t, h + m, 0);
#pragma omp simd
      for (int64_t i = 0; i < v_dim; ++i) {
        store(out[i], sum_pv[m][i] * inverse);
      }
      lse_TH(t, h + m) = softmax[m].lse();
    }
  }
}

// Pass 1 computes p and ds of every pair, and dq; pass 2 sums them by key. The
// workspace holds [T, K, 2, H]: the p of a pair's heads, then their ds.
template <class T>
struct Backward {
  using A = Accumulator<T>;
  View<const T> dout, q, kv;
  View<const int32_t> ids;
  View<const T> o;
  View<const A> lse;
  View<const int32_t> offsets, entries;
  A scale;
  View<T> dq, dkv;
  A* pairs;
  int64_t heads = q.size(1), dim = q.size(2), v_dim = o.size(2);
  int64_t slots = ids.size(1);

  A* p_of(int64_t entry) const { return pairs + entry * 2 * heads; }
  A* ds_of(int64_t entry) const { return p_of(entry) + heads; }

  void query(int64_t t) const {
    A q_buffer[kConverted<T, kRowTile>], do_buffer[kConverted<T, kRowTile>];
    A kv_buffer[kKeyTile * kMaxHeadDim], dq_buffer[kRowTile * kMaxHeadDim];
    A p_buffer[kRowTile * kKeyTile], ds_buffer[kRowTile * kKeyTile];
    const Rows<A> p{p_buffer, kKeyTile}, ds{ds_buffer, kKeyTile};
    const Rows<A> sum{dq_buffer, dim};
    const int32_t* row = ids.data + t * ids.strides[0];
    // The softmax of one score is 1, whatever the score: no rounding of
    // do . kv - do . o may say otherwise.
    const bool alone = std::count_if(row, row + slots,
                                     [](int32_t id) { return id >= 0; }) == 1;
    const A ds_scale = alone ? A(0) : scale;
    for (int64_t h = 0; h < heads; h += kRowTile) {
      const int64_t n = std::min<int64_t>(kRowTile, heads - h);
      const Rows<const A> q_rows = heads_of(q, t, h, n, q_buffer);
      const Rows<const A> do_rows = heads_of(dout, t, h, n, do_buffer);
      A delta[kRowTile];
      for (int64_t m = 0; m < n; ++m) {
        delta[m] = dot(&dout(t, h + m, 0), &o(t, h + m, 0), v_dim);
      }
      std::fill_n(dq_buffer, n * dim, A(0));
      visit_selected(row, slots, [&](const Selected& tile) {
        const Rows<const A> keys = gather(kv, tile, kv_buffer);
        dots(n, tile.count, dim, q_rows, keys, p);
        dots(n, tile.count, v_dim, do_rows, keys, ds);
        for (int64_t m = 0; m < n; ++m) {
          A *pm = p[m], *dsm = ds[m];
          const A norm = lse(t, h + m);
#pragma omp simd
          for (int j = 0; j < tile.count; ++j) {
            pm[j] = exp_simd(pm[j] * scale - norm);
            dsm[j] = pm[j] * (dsm[j] - delta[m]) * ds_scale;
          }
        }
        add_product(n, dim, tile.count, plain(ds), keys, sum);
        for (int j = 0; j < tile.count; ++j) {
          const int64_t entry = t * slots + tile.slot[j];
          for (int64_t m = 0; m < n; ++m) {
            p_of(entry)[h + m] = p[m][j];
            ds_of(entry)[h + m] = ds[m][j];
          }
        }
      });
      for (int64_t m = 0; m < n; ++m) {
        convert(sum[m], &dq(t, h + m, 0), dim);
      }
    }
  }

  // dkv of keys [first, last).
  void keys(int64_t first, int64_t last) const {
    A sum_buffer[kKeysPerChunk * kMaxHeadDim];
    std::fill_n(sum_buffer, (last - first) * dim, A(0));
    const Rows<A> sum{sum_buffer, dim};
    visit_entries(offsets, entries, first, last, q.size(0), slots,
                  heads * (dim + v_dim) * int64_t{sizeof(T)},
                  [&](int64_t s, int32_t entry) {
                    add_entry(entry, sum.from(s - first));
                  });
    for (int64_t s = first; s < last; ++s) {
      convert(sum[s - first], &dkv(s, 0), dim);
    }
  }

  void add_entry(int32_t entry, Rows<A> sum) const {
    A q_buffer[kConverted<T, kRowTile>], do_buffer[kConverted<T, kRowTile>];
    const int64_t t = entry / static_cast<int32_t>(slots);
    for (int64_t h = 0; h < heads; h += kRowTile) {
      const int64_t n = std::min<int64_t>(kRowTile, heads - h);
      add_product(1, dim, n, Factor<A>{ds_of(entry) + h, 0, 1},
                  heads_of(q, t, h, n, q_buffer), sum);
      add_product(1, v_dim, n, Factor<A>{p_of(entry) + h, 0, 1},
                  heads_of(dout, t, h, n, do_buffer), sum);
    }
  }
};

}  // namespace

template <class T>
void sparse_attention_forward(Launch l, View<const T> q_THD,
                              View<const T> kv_SD, View<const int32_t> ids_TK,
                              double scale, View<T> o_THV,
                              View<Accumulator<T>> lse_TH) {
  if (l.dry) return;
  check_shapes<T>(q_THD, kv_SD, ids_TK, o_THV, lse_TH);
  if (kCuda && l.on_cuda()) {
    return cuda::sparse_attention_forward<T>(l, q_THD, kv_SD, ids_TK, scale,
                                             o_THV, lse_TH);
  }
  l.threads->parallel_for(
      q_THD.size(0), kQueriesPerChunk, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          const int32_t* ids = ids_TK.data + t * ids_TK.strides[0];
          check_ids("sparse_attention", ids, ids_TK.size(1), kv_SD.size(0));
          forward_row(t, q_THD, kv_SD, ids, ids_TK.size(1),
                      Accumulator<T>(scale), o_THV, lse_TH);
        }
      });
}

size_t invert_ids_workspace_bytes(const Launch& l,
                                  const View<const int32_t>& ids_TK,
                                  int64_t keys) {
  if (kCuda && l.on_cuda()) {
    return cuda::invert_ids_workspace_bytes(ids_TK, keys);
  }
  return 0;
}

void invert_ids(Launch l, View<const int32_t> ids_TK, View<int32_t> offsets_S1,
                View<int32_t> entries, std::byte* workspace) {
  if (l.dry) return;
  CHECK(ids_TK.rank() == 2 && offsets_S1.rank() == 1 && entries.rank() == 1 &&
        offsets_S1.size(0) >= 1 && entries.size(0) >= ids_TK.elements() &&
        dense_rows(ids_TK))
      << "[invert_ids] shapes: ids is " << describe(ids_TK) << ", offsets is "
      << describe(offsets_S1) << ", entries is " << describe(entries);
  CHECK_LT(ids_TK.elements(), int64_t{1} << 31) << "[invert_ids] pairs";
  if (kCuda && l.on_cuda()) {
    return cuda::invert_ids(l, ids_TK, offsets_S1, entries, workspace);
  }
  const int64_t keys = offsets_S1.size(0) - 1;
  const int64_t tokens = ids_TK.size(0), slots = ids_TK.size(1);
  const auto for_each_id = [&](auto f) {
    for (int64_t t = 0; t < tokens; ++t) {
      const int32_t* ids = ids_TK.data + t * ids_TK.strides[0];
      for (int64_t j = 0; j < slots; ++j) {
        if (ids[j] >= 0) f(ids[j], static_cast<int32_t>(t * slots + j));
      }
    }
  };
  // A counting sort: offsets hold counts, then the place of each key's next
  // entry, then, moved up by one key, the places where entries begin.
  for (int64_t s = 0; s <= keys; ++s) offsets_S1(s) = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    internal::check_ids("invert_ids", ids_TK.data + t * ids_TK.strides[0],
                        slots, keys);
  }
  for_each_id([&](int32_t id, int32_t) { ++offsets_S1(id); });
  int32_t next = 0;
  for (int64_t s = 0; s <= keys; ++s) {
    const int32_t count = offsets_S1(s);
    offsets_S1(s) = next;
    next += count;
  }
  for_each_id(
      [&](int32_t id, int32_t entry) { entries(offsets_S1(id)++) = entry; });
  for (int64_t s = keys; s > 0; --s) offsets_S1(s) = offsets_S1(s - 1);
  offsets_S1(0) = 0;
}

template <class T>
size_t sparse_attention_backward_workspace_bytes(
    const Launch& l, const View<const T>& q_THD, const View<const T>& kv_SD,
    const View<const int32_t>& ids_TK, const View<const T>& o_THV,
    double scale) {
  if (kCuda && l.on_cuda()) {
    return cuda::sparse_attention_backward_workspace_bytes(q_THD, kv_SD, ids_TK,
                                                           o_THV, scale);
  }
  return static_cast<size_t>(ids_TK.elements() * 2 * q_THD.size(1)) *
         sizeof(Accumulator<T>);
}

template <class T>
void sparse_attention_backward(Launch l, View<const T> do_THV,
                               View<const T> q_THD, View<const T> kv_SD,
                               View<const int32_t> ids_TK, View<const T> o_THV,
                               View<const Accumulator<T>> lse_TH,
                               View<const int32_t> inverse_offsets_S1,
                               View<const int32_t> inverse_entries,
                               double scale, View<T> dq_THD, View<T> dkv_SD,
                               std::byte* workspace) {
  if (l.dry) return;
  using A = Accumulator<T>;
  check_shapes<T>(q_THD, kv_SD, ids_TK, o_THV, lse_TH);
  CHECK(do_THV.shape == o_THV.shape && dq_THD.shape == q_THD.shape &&
        dkv_SD.shape == kv_SD.shape && dense_rows(do_THV) &&
        dense_rows(dq_THD) && dense_rows(dkv_SD))
      << "[sparse_attention] gradients: do is " << describe(do_THV)
      << ", dq is " << describe(dq_THD) << ", dkv is " << describe(dkv_SD);
  const auto inverse = [&] {
    return "offsets is " + describe(inverse_offsets_S1) + ", entries is " +
           describe(inverse_entries) + " for kv " + describe(kv_SD);
  };
  CHECK((inverse_offsets_S1.shape == Shape{kv_SD.size(0) + 1}) &&
        inverse_entries.rank() == 1)
      << "[sparse_attention] inverse: " << inverse();
  if (kCuda && l.on_cuda()) {
    return cuda::sparse_attention_backward<T>(
        l, do_THV, q_THD, kv_SD, ids_TK, o_THV, lse_TH, inverse_offsets_S1,
        inverse_entries, scale, dq_THD, dkv_SD, workspace);
  }
  CHECK_LE(inverse_offsets_S1(kv_SD.size(0)), inverse_entries.size(0))
      << "[sparse_attention] inverse: " << inverse();
  const Backward<T> backward{do_THV,
                             q_THD,
                             kv_SD,
                             ids_TK,
                             o_THV,
                             lse_TH,
                             inverse_offsets_S1,
                             inverse_entries,
                             A(scale),
                             dq_THD,
                             dkv_SD,
                             reinterpret_cast<A*>(workspace)};
  l.threads->parallel_for(
      q_THD.size(0), kQueriesPerChunk, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          check_ids("sparse_attention", ids_TK.data + t * ids_TK.strides[0],
                    ids_TK.size(1), kv_SD.size(0));
          backward.query(t);
        }
      });
  l.threads->parallel_for(
      kv_SD.size(0), kKeysPerChunk,
      [&](int64_t begin, int64_t end) { backward.keys(begin, end); });
}

template <class T>
Cost sparse_attention_forward_cost(int64_t tokens, int64_t heads, int64_t dim,
                                   int64_t v_dim, int64_t selected) {
  const double pairs = static_cast<double>(tokens) * selected;
  const double rows = static_cast<double>(tokens) * heads;
  return {2 * pairs * heads * (dim + v_dim),
          pairs * (dim * sizeof(T) + 4) +
              rows * ((dim + v_dim) * sizeof(T) + sizeof(Accumulator<T>))};
}

template <class T>
Cost sparse_attention_backward_cost(int64_t tokens, int64_t heads, int64_t dim,
                                    int64_t v_dim, int64_t selected) {
  const double pairs = static_cast<double>(tokens) * selected;
  const double rows = static_cast<double>(tokens) * heads;
  return {2 * pairs * heads * (3 * dim + 2 * v_dim),
          pairs * (2 * dim * sizeof(T) + 8) +
              rows * (2 * (dim + v_dim) * sizeof(T) + sizeof(Accumulator<T>))};
}

#define TAPELINE_SPARSE_ATTENTION(T)                                         \
  template void sparse_attention_forward<T>(                                 \
      Launch, View<const T>, View<const T>, View<const int32_t>, double,     \
      View<T>, View<Accumulator<T>>);                                        \
  template size_t sparse_attention_backward_workspace_bytes<T>(              \
      const Launch&, const View<const T>&, const View<const T>&,             \
      const View<const int32_t>&, const View<const T>&, double);             \
  template void sparse_attention_backward<T>(                                \
      Launch, View<const T>, View<const T>, View<const T>,                   \
      View<const int32_t>, View<const T>, View<const Accumulator<T>>,        \
      View<const int32_t>, View<const int32_t>, double, View<T>, View<T>,    \
      std::byte*);                                                           \
  template Cost sparse_attention_forward_cost<T>(int64_t, int64_t, int64_t,  \
                                                 int64_t, int64_t);          \
  template Cost sparse_attention_backward_cost<T>(int64_t, int64_t, int64_t, \
                                                  int64_t, int64_t);
TAPELINE_SPARSE_ATTENTION(float)
TAPELINE_SPARSE_ATTENTION(bf16)
TAPELINE_SPARSE_ATTENTION(double)
#undef TAPELINE_SPARSE_ATTENTION

}  // namespace tapeline
