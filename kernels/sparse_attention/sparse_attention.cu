// Plain: 16 heads of a query by tiles of 64 of its keys, in Accumulator<T>,
// right at any size.
#include "kernels/cuda_tile.cuh"
#include "kernels/sparse_attention/sparse_attention_cuda.h"
#include "kernels/sparse_attention/sparse_attention_wgmma.h"

namespace tapeline::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kTileThreads)
    sparse_attention_forward_kernel(Rows<const T, 3> q, Rows<const T, 2> kv,
                                    Rows<const int32_t, 2> ids,
                                    Accumulator<T> scale, Rows<T, 3> o,
                                    Rows<Accumulator<T>, 2> lse) {
  using A = Accumulator<T>;
  __shared__ SelectedTiles::Shared selected;
  __shared__ alignas(16) Coefficients<A> p;
  __shared__ A factor[kRowsOfDots];
  const HeadTile tile = HeadTile::of_block(q.size[1]);
  const int m = threadIdx.x / 16, n = threadIdx.x % 16;
  const int64_t v_dim = o.size[2];
  SelectedTiles keys(selected, ids.row(tile.t), ids.size[1]);
  RowSoftmax<A> softmax;
  A sum[kColumns][kRowsOfDots] = {};
  while (const int count = keys.next()) {
    A score[4];
    dots(q.size[2], heads_of(q, tile), keys_of(kv, keys, count), score);
    bool in[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) in[i] = n + 16 * i < count;
    const A shrink = softmax.add(score, in, scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) p[n + 16 * i][m] = score[i];
    if (n == 0) factor[m] = shrink;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int64_t column = threadIdx.x + i * kTileThreads;
      if (column >= v_dim) break;
#pragma unroll
      for (int r = 0; r < kRowsOfDots; ++r) sum[i][r] *= factor[r];
      for (int j = 0; j < count; ++j) {
        add_rows(p[j], A(load(kv(keys.id(j), column))), sum[i]);
      }
    }
  }
  __syncthreads();
  if (n == 0) {
    factor[m] = softmax.inverse();
    if (m < tile.heads) lse(tile.t, tile.first + m) = softmax.lse();
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int64_t column = threadIdx.x + i * kTileThreads;
    if (column >= v_dim) break;
#pragma unroll
    for (int r = 0; r < kRowsOfDots; ++r) {
      if (r >= tile.heads) continue;
      store(o(tile.t, tile.first + r, column), sum[i][r] * factor[r]);
    }
  }
}

// --- backward ----------------------------------------------------------------

// The workspace: [T, K, 2, H], the p of a pair's heads, then their ds.
template <class A>
struct Pairs {
  A* data;
  int64_t heads;
  __device__ A* p(int64_t entry) const { return data + entry * 2 * heads; }
  __device__ A* ds(int64_t entry) const { return p(entry) + heads; }
};

// p and ds of the pairs of sixteen heads, and their dq.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    sparse_attention_backward_queries_kernel(
        Rows<const T, 3> dout, Rows<const T, 3> q, Rows<const T, 2> kv,
        Rows<const int32_t, 2> ids, Rows<const T, 3> o,
        Rows<const Accumulator<T>, 2> lse, Accumulator<T> scale, Rows<T, 3> dq,
        Pairs<Accumulator<T>> pairs) {
  using A = Accumulator<T>;
  __shared__ SelectedTiles::Shared selected;
  __shared__ alignas(16) Coefficients<A> p, ds;
  const HeadTile tile = HeadTile::of_block(q.size[1]);
  const int m = threadIdx.x / 16, n = threadIdx.x % 16;
  const int64_t dim = q.size[2], v_dim = o.size[2], slots = ids.size[1];
  A norm = 0, delta = 0;
  if (m < tile.heads) norm = lse(tile.t, tile.first + m);
  {
    // A head that does not exist takes part in the shuffles of its neighbour.
    const int64_t head = tile.first + min(m, tile.heads - 1);
    delta = shared_dot<16>(&dout(tile.t, head, 0), &o(tile.t, head, 0), v_dim);
  }
  SelectedTiles keys(selected, ids.row(tile.t), slots);
  A sum[kColumns][kRowsOfDots] = {};
  while (const int count = keys.next()) {
    A score[4], dp[4];
    dots(dim, heads_of(q, tile), keys_of(kv, keys, count), score);
    dots(v_dim, heads_of(dout, tile), keys_of(kv, keys, count), dp);
    // The softmax of one score is 1, whatever the score: no rounding of
    // do . kv - do . o may say otherwise.
    const bool alone = count == 1 && keys.before() == 0 && keys.last();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = n + 16 * i;
      const bool in = m < tile.heads && j < count;
      const A weight = in ? exp(mul(score[i], scale) - norm) : A(0);
      p[j][m] = weight;
      ds[j][m] = in && !alone ? weight * (dp[i] - delta) * scale : A(0);
    }
    __syncthreads();
    for (int at = threadIdx.x; at < count * kRowsOfDots; at += kTileThreads) {
      const int j = at / kRowsOfDots, h = at % kRowsOfDots;
      if (h >= tile.heads) continue;
      const int64_t entry = tile.t * slots + keys.slot(j);
      pairs.p(entry)[tile.first + h] = p[j][h];
      pairs.ds(entry)[tile.first + h] = ds[j][h];
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int64_t column = threadIdx.x + i * kTileThreads;
      if (column >= dim) break;
      for (int j = 0; j < count; ++j) {
        add_rows(ds[j], A(load(kv(keys.id(j), column))), sum[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int64_t column = threadIdx.x + i * kTileThreads;
    if (column >= dim) break;
#pragma unroll
    for (int r = 0; r < kRowsOfDots; ++r) {
      if (r < tile.heads) store(dq(tile.t, tile.first + r, column), sum[i][r]);
    }
  }
}

constexpr int kKeyThreads = 128;

// One block 128 columns of one key's gradient: its entries in order, and heads
// within an entry.
template <class T>
__global__ void __launch_bounds__(kKeyThreads)
    sparse_attention_backward_keys_kernel(
        Rows<const T, 3> dout, Rows<const T, 3> q,
        Rows<const int32_t, 1> offsets, Rows<const int32_t, 1> entries,
        int32_t slots, Pairs<Accumulator<T>> pairs, Rows<T, 2> dkv) {
  using A = Accumulator<T>;
  const int64_t dim = q.size[2], v_dim = dout.size[2], heads = q.size[1];
  const int64_t blocks = ceil_div(dim, kKeyThreads);
  const int64_t s = blockIdx.x / blocks;
  const int64_t column = blockIdx.x % blocks * kKeyThreads + threadIdx.x;
  if (column >= dim) return;
  A sum = 0;
  for (int32_t i = offsets(s); i < offsets(s + 1); ++i) {
    const int32_t entry = entries(i), t = entry / slots;
    const A *p = pairs.p(entry), *ds = pairs.ds(entry);
    const T* queries = &q(t, 0, column);
    if (column < v_dim) {
      const T* douts = &dout(t, 0, column);
#pragma unroll 4
      for (int64_t h = 0; h < heads; ++h) {
        sum = fma(ds[h], A(load(queries[h * q.stride[1]])), sum);
        sum = fma(p[h], A(load(douts[h * dout.stride[1]])), sum);
      }
    } else {
#pragma unroll 4
      for (int64_t h = 0; h < heads; ++h) {
        sum = fma(ds[h], A(load(queries[h * q.stride[1]])), sum);
      }
    }
  }
  store(dkv(s, column), sum);
}

template <class T>
bool takes_wgmma(const View<const T>& q_THD, const View<const T>& kv_SD,
                 const View<const int32_t>& ids_TK, const View<const T>& o_THV,
                 double scale) {
  if constexpr (std::is_same_v<T, bf16>) {
    return sparse_attention_path(q_THD, kv_SD, ids_TK, o_THV, scale) ==
           SparseAttentionPath::kWgmma;
  }
  return false;
}

template <class T>
SparseBackwardPlan backward_plan(const View<const T>& q_THD,
                                 const View<const T>& kv_SD,
                                 const View<const int32_t>& ids_TK) {
  return sparse_backward_plan(q_THD.size(0), kv_SD.size(0), q_THD.size(1),
                              kv_SD.size(1), ids_TK.size(1));
}

}  // namespace

template <class T>
size_t sparse_attention_backward_workspace_bytes(
    const View<const T>& q_THD, const View<const T>& kv_SD,
    const View<const int32_t>& ids_TK, const View<const T>& o_THV,
    double scale) {
  if (takes_wgmma<T>(q_THD, kv_SD, ids_TK, o_THV, scale)) {
    return backward_plan<T>(q_THD, kv_SD, ids_TK).bytes;
  }
  return static_cast<size_t>(ids_TK.elements() * 2 * q_THD.size(1)) *
         sizeof(Accumulator<T>);
}

template <class T>
void sparse_attention_forward(Launch l, View<const T> q_THD,
                              View<const T> kv_SD, View<const int32_t> ids_TK,
                              double scale, View<T> o_THV,
                              View<Accumulator<T>> lse_TH) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (takes_wgmma<T>(q_THD, kv_SD, ids_TK, o_THV, scale)) {
      return sparse_attention_forward_wgmma(l, q_THD, kv_SD, ids_TK, scale,
                                            o_THV, lse_TH);
    }
  }
  const int64_t blocks = q_THD.size(0) * ceil_div(q_THD.size(1), kRowsOfDots);
  if (blocks == 0) return;
  sparse_attention_forward_kernel<T>
      <<<static_cast<unsigned>(blocks), kTileThreads, 0, stream_of(l)>>>(
          rows<3>(q_THD), rows<2>(kv_SD), rows<2>(ids_TK),
          static_cast<Accumulator<T>>(scale), rows<3>(o_THV), rows<2>(lse_TH));
  check_launch("sparse_attention_forward");
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
  using A = Accumulator<T>;
  if constexpr (std::is_same_v<T, bf16>) {
    if (takes_wgmma<T>(q_THD, kv_SD, ids_TK, o_THV, scale)) {
      return sparse_attention_backward_wgmma(
          l, backward_plan<T>(q_THD, kv_SD, ids_TK), do_THV, q_THD, kv_SD,
          ids_TK, o_THV, lse_TH, inverse_offsets_S1, inverse_entries, scale,
          dq_THD, dkv_SD, workspace);
    }
  }
  const Pairs<A> pairs{reinterpret_cast<A*>(workspace), q_THD.size(1)};
  const int64_t queries = q_THD.size(0) * ceil_div(q_THD.size(1), kRowsOfDots);
  if (queries > 0) {
    sparse_attention_backward_queries_kernel<T>
        <<<static_cast<unsigned>(queries), kTileThreads, 0, stream_of(l)>>>(
            rows<3>(do_THV), rows<3>(q_THD), rows<2>(kv_SD), rows<2>(ids_TK),
            rows<3>(o_THV), rows<2>(lse_TH), static_cast<A>(scale),
            rows<3>(dq_THD), pairs);
    check_launch("sparse_attention_backward");
  }
  const int64_t keys = kv_SD.size(0) * ceil_div(kv_SD.size(1), kKeyThreads);
  if (keys == 0) return;
  sparse_attention_backward_keys_kernel<T>
      <<<static_cast<unsigned>(keys), kKeyThreads, 0, stream_of(l)>>>(
          rows<3>(do_THV), rows<3>(q_THD), rows<1>(inverse_offsets_S1),
          rows<1>(inverse_entries), static_cast<int32_t>(ids_TK.size(1)), pairs,
          rows<2>(dkv_SD));
  check_launch("sparse_attention_backward");
}

#define TAPELINE_SPARSE_ATTENTION(T)                                          \
  template void sparse_attention_forward<T>(                                  \
      Launch, View<const T>, View<const T>, View<const int32_t>, double,      \
      View<T>, View<Accumulator<T>>);                                         \
  template size_t sparse_attention_backward_workspace_bytes<T>(               \
      const View<const T>&, const View<const T>&, const View<const int32_t>&, \
      const View<const T>&, double);                                          \
  template void sparse_attention_backward<T>(                                 \
      Launch, View<const T>, View<const T>, View<const T>,                    \
      View<const int32_t>, View<const T>, View<const Accumulator<T>>,         \
      View<const int32_t>, View<const int32_t>, double, View<T>, View<T>,     \
      std::byte*);
TAPELINE_SPARSE_ATTENTION(float)
TAPELINE_SPARSE_ATTENTION(bf16)
TAPELINE_SPARSE_ATTENTION(double)
#undef TAPELINE_SPARSE_ATTENTION

}  // namespace tapeline::cuda
