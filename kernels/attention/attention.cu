// Plain: 16 rows by tiles of 64 keys, or 16 keys by tiles of 64 rows, in
// Accumulator<T>, right at any size. A row is one (query, head) pair of one
// group: row r of group g is head g (H/G) + r % (H/G) of query r / (H/G).
#include "kernels/attention/attention_cuda.h"
#include "kernels/attention/attention_wgmma.h"
#include "kernels/cuda_tile.cuh"

namespace tapeline::cuda {
namespace {

template <class T>
struct Problem {
  using A = Accumulator<T>;
  Rows<const T, 3> q, k, v;
  Rows<const int32_t, 1> begin, end;
  A scale;
  int64_t ratio, rows;  // heads of a group, rows of a group

  __device__ int64_t dim() const { return q.size[2]; }
  __device__ int64_t v_dim() const { return v.size[2]; }
  __device__ int64_t keys() const { return k.size[0]; }
  // Row r of group g in x [T, H, ...].
  template <class U, int N>
  __device__ U* at(const Rows<U, N>& x, int64_t g, int64_t r) const {
    return x.data + r / ratio * x.stride[0] +
           (g * ratio + r % ratio) * x.stride[1];
  }
};

// What a tile of kCount rows sees; in shared memory. Rows past the last see
// nothing.
template <int kCount>
struct Ranges {
  int32_t begin[kCount], end[kCount];

  template <class T>
  __device__ void fill(const Problem<T>& p, int64_t first) {
    const int m = threadIdx.x;
    if (m >= kCount) return;
    const int64_t r = first + m;
    begin[m] = r < p.rows ? p.begin(r / p.ratio) : 0;
    end[m] = r < p.rows ? p.end(r / p.ratio) : 0;
  }
  __device__ bool sees(int m, int64_t key) const {
    return begin[m] <= key && key < end[m];
  }
  __device__ bool sees_any(int m, int64_t key, int64_t keys) const {
    return max(int64_t{begin[m]}, key) < min(int64_t{end[m]}, key + keys);
  }
};

// The keys that sixteen rows walk: tiles start at multiples of kTile whatever
// the rows, so that a row's bits do not depend on its neighbours.
struct Walk {
  int64_t begin, end;

  __device__ explicit Walk(const Ranges<kRowsOfDots>& rows) {
    int64_t first = int64_t{1} << 62;
    end = 0;
#pragma unroll
    for (int m = 0; m < kRowsOfDots; ++m) {
      if (rows.begin[m] >= rows.end[m]) continue;
      first = min(first, int64_t{rows.begin[m]});
      end = max(end, int64_t{rows.end[m]});
    }
    begin = first / kTile * kTile;
  }
};

// Which of the sixteen rows see each key of a tile, as bits; rows that do not
// exist count as seeing, so that whole tiles take the short way.
__device__ void see_keys(const Ranges<kRowsOfDots>& rows, int count,
                         int64_t key, unsigned* seen) {
  const int j = threadIdx.x;
  if (j >= kTile) return;
  unsigned bits = 0;
#pragma unroll
  for (int m = 0; m < kRowsOfDots; ++m) {
    bits |= (m >= count || rows.sees(m, key + j) ? 1u : 0u) << m;
  }
  seen[j] = bits;
}

// What dots loads. Rows of x [T, H, n] and keys of x [S, G, n]; zero where
// there is none.
template <class T>
__device__ auto rows_of(const T* const* row) {
  return [=](int m, int64_t d) {
    return row[m] != nullptr ? Accumulator<T>(load(row[m][d]))
                             : Accumulator<T>(0);
  };
}
template <class T>
__device__ auto keys_of(const Rows<const T, 3>& x, int64_t g, int64_t key) {
  return [=](int n, int64_t d) {
    return key + n < x.size[0] ? Accumulator<T>(load(x(key + n, g, d)))
                               : Accumulator<T>(0);
  };
}

// The block's sixteen rows.
template <class T>
struct RowTile {
  int64_t g, first;
  int count;

  __device__ explicit RowTile(const Problem<T>& p) {
    const int64_t tiles = ceil_div(p.rows, kRowsOfDots);
    g = blockIdx.x / tiles;
    first = blockIdx.x % tiles * kRowsOfDots;
    count = static_cast<int>(min(int64_t{kRowsOfDots}, p.rows - first));
  }
};

template <class T>
__global__ void __launch_bounds__(kTileThreads)
    attention_forward_kernel(Problem<T> p, Rows<T, 3> o,
                             Rows<Accumulator<T>, 2> lse) {
  using A = Accumulator<T>;
  __shared__ alignas(16) Coefficients<A> weight;
  __shared__ A factor[kRowsOfDots];
  __shared__ const T* queries[kRowsOfDots];
  __shared__ Ranges<kRowsOfDots> ranges;
  __shared__ unsigned seen[kTile];
  const RowTile<T> tile(p);
  const int m = threadIdx.x / 16, n = threadIdx.x % 16;
  ranges.fill(p, tile.first);
  if (n == 0) {
    queries[m] = m < tile.count ? p.at(p.q, tile.g, tile.first + m) : nullptr;
  }
  __syncthreads();
  const Walk walk(ranges);
  RowSoftmax<A> softmax;
  A sum[kColumns][kRowsOfDots] = {};
  for (int64_t key = walk.begin; key < walk.end; key += kTile) {
    A score[4];
    dots(p.dim(), rows_of(queries), keys_of(p.k, tile.g, key), score);
    bool in[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) in[i] = ranges.sees(m, key + n + 16 * i);
    const A shrink = softmax.add(score, in, p.scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) weight[n + 16 * i][m] = score[i];
    if (n == 0) factor[m] = shrink;
    see_keys(ranges, tile.count, key, seen);
    __syncthreads();
    const int count = static_cast<int>(min(int64_t{kTile}, p.keys() - key));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int64_t column = threadIdx.x + i * kTileThreads;
      if (column >= p.v_dim()) break;
#pragma unroll
      for (int r = 0; r < kRowsOfDots; ++r) sum[i][r] *= factor[r];
      for (int j = 0; j < count; ++j) {
        add_rows(weight[j], A(load(p.v(key + j, tile.g, column))), seen[j],
                 sum[i]);
      }
    }
    __syncthreads();
  }
  if (n == 0) {
    factor[m] = softmax.inverse();
    if (m < tile.count) *p.at(lse, tile.g, tile.first + m) = softmax.lse();
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int64_t column = threadIdx.x + i * kTileThreads;
    if (column >= p.v_dim()) break;
#pragma unroll
    for (int r = 0; r < kRowsOfDots; ++r) {
      if (r >= tile.count) continue;
      store(p.at(o, tile.g, tile.first + r)[column], sum[i][r] * factor[r]);
    }
  }
}

// --- backward ----------------------------------------------------------------

// p and scale * ds of one pair from the products of its rows.
template <class A>
struct Pair {
  A p = 0, ds = 0;
  Pair() = default;
  __device__ Pair(bool in, A score, A dp, A scale, A lse, A delta) {
    p = in ? exp(mul(score, scale) - lse) : A(0);
    ds = in ? p * (dp - delta) * scale : A(0);
  }
};

// dq of sixteen rows: keys in ascending order.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    attention_backward_queries_kernel(Problem<T> p, Rows<const T, 3> dout,
                                      Rows<const T, 3> o,
                                      Rows<const Accumulator<T>, 2> lse,
                                      Rows<T, 3> dq) {
  using A = Accumulator<T>;
  __shared__ alignas(16) Coefficients<A> ds;
  __shared__ const T *queries[kRowsOfDots], *douts[kRowsOfDots];
  __shared__ Ranges<kRowsOfDots> ranges;
  __shared__ unsigned seen[kTile];
  const RowTile<T> tile(p);
  const int m = threadIdx.x / 16, n = threadIdx.x % 16;
  ranges.fill(p, tile.first);
  // A row that does not exist takes part in the shuffles of its neighbour.
  const int64_t r = tile.first + min(m, tile.count - 1);
  const A norm = *p.at(lse, tile.g, r);
  const A delta =
      shared_dot<16>(p.at(dout, tile.g, r), p.at(o, tile.g, r), p.v_dim());
  if (n == 0) {
    const bool exists = m < tile.count;
    queries[m] = exists ? p.at(p.q, tile.g, r) : nullptr;
    douts[m] = exists ? p.at(dout, tile.g, r) : nullptr;
  }
  __syncthreads();
  const Walk walk(ranges);
  A sum[kColumns][kRowsOfDots] = {};
  for (int64_t key = walk.begin; key < walk.end; key += kTile) {
    A score[4], dp[4];
    dots(p.dim(), rows_of(queries), keys_of(p.k, tile.g, key), score);
    dots(p.v_dim(), rows_of(douts), keys_of(p.v, tile.g, key), dp);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = n + 16 * i;
      ds[j][m] = Pair<A>(ranges.sees(m, key + j), score[i], dp[i], p.scale,
                         norm, delta)
                     .ds;
    }
    see_keys(ranges, tile.count, key, seen);
    __syncthreads();
    const int count = static_cast<int>(min(int64_t{kTile}, p.keys() - key));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int64_t column = threadIdx.x + i * kTileThreads;
      if (column >= p.dim()) break;
      for (int j = 0; j < count; ++j) {
        add_rows(ds[j], A(load(p.k(key + j, tile.g, column))), seen[j], sum[i]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int64_t column = threadIdx.x + i * kTileThreads;
    if (column >= p.dim()) break;
#pragma unroll
    for (int h = 0; h < kRowsOfDots; ++h) {
      if (h >= tile.count) continue;
      store(p.at(dq, tile.g, tile.first + h)[column], sum[i][h]);
    }
  }
}

// dk and dv of sixteen keys: rows in ascending order. A block has 256 of the
// columns of dk and, behind them, dv.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    attention_backward_keys_kernel(Problem<T> p, Rows<const T, 3> dout,
                                   Rows<const T, 3> o,
                                   Rows<const Accumulator<T>, 2> lse,
                                   Rows<T, 3> dk, Rows<T, 3> dv) {
  using A = Accumulator<T>;
  __shared__ alignas(16) Coefficients<A> weight, ds;
  __shared__ const T *queries[kTile], *douts[kTile];
  __shared__ A norm[kTile], delta[kTile];
  __shared__ Ranges<kTile> ranges;
  const int64_t chunks = ceil_div(p.dim() + p.v_dim(), kTileThreads);
  const int64_t tiles = ceil_div(p.keys(), kRowsOfDots);
  const int64_t g = blockIdx.x / (tiles * chunks);
  const int64_t key = blockIdx.x / chunks % tiles * kRowsOfDots;
  const int count = static_cast<int>(min(int64_t{kRowsOfDots}, p.keys() - key));
  const int64_t column = blockIdx.x % chunks * kTileThreads + threadIdx.x;
  const int m = threadIdx.x / 16, n = threadIdx.x % 16;
  A sum[kRowsOfDots] = {};
  for (int64_t first = 0; first < p.rows; first += kTile) {
    ranges.fill(p, first);
    // A thread asks about the row that it filled in.
    const bool sees =
        threadIdx.x < kTile && ranges.sees_any(threadIdx.x, key, count);
    if (!__syncthreads_or(sees)) continue;
    {
      constexpr int kShare = kTileThreads / kTile;
      const int row = threadIdx.x / kShare;
      const bool exists = first + row < p.rows;
      const int64_t r = exists ? first + row : p.rows - 1;
      const A dot =
          shared_dot<kShare>(p.at(dout, g, r), p.at(o, g, r), p.v_dim());
      if (threadIdx.x % kShare == 0) {
        delta[row] = dot;
        norm[row] = *p.at(lse, g, r);
        queries[row] = exists ? p.at(p.q, g, r) : nullptr;
        douts[row] = exists ? p.at(dout, g, r) : nullptr;
      }
    }
    __syncthreads();
    A score[4], dp[4];
    dots(p.dim(), keys_of(p.k, g, key), rows_of(queries), score);
    dots(p.v_dim(), keys_of(p.v, g, key), rows_of(douts), dp);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = n + 16 * i;
      const Pair<A> pair(m < count && ranges.sees(row, key + m), score[i],
                         dp[i], p.scale, norm[row], delta[row]);
      weight[row][m] = pair.p;
      ds[row][m] = pair.ds;
    }
    __syncthreads();
    const bool is_key = column < p.dim();
    const int64_t at = is_key ? column : column - p.dim();
    const int rows = at < (is_key ? p.dim() : p.v_dim())
                         ? static_cast<int>(min(int64_t{kTile}, p.rows - first))
                         : 0;
    for (int j = 0; j < rows; ++j) {
      const int64_t lo = max(int64_t{ranges.begin[j]} - key, int64_t{0});
      const int64_t hi = min(int64_t{ranges.end[j]} - key, int64_t{count});
      if (lo >= hi) continue;
      // Keys that do not exist count as seen.
      const auto end = static_cast<int>(hi == count ? kRowsOfDots : hi);
      const unsigned bits = (1u << end) - (1u << static_cast<int>(lo));
      if (is_key) {
        add_rows(ds[j], A(load(queries[j][at])), bits, sum);
      } else {
        add_rows(weight[j], A(load(douts[j][at])), bits, sum);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int j = 0; j < kRowsOfDots; ++j) {
    if (j >= count) continue;
    if (column < p.dim()) {
      store(dk(key + j, g, column), sum[j]);
    } else if (column - p.dim() < p.v_dim()) {
      store(dv(key + j, g, column - p.dim()), sum[j]);
    }
  }
}

template <class T>
Problem<T> problem(const View<const T>& q, const View<const T>& k,
                   const View<const T>& v, const KeyRange& range,
                   double scale) {
  const int64_t ratio = q.size(1) / k.size(1);
  return {rows<3>(q),
          rows<3>(k),
          rows<3>(v),
          rows<1>(range.begin),
          rows<1>(range.end),
          static_cast<Accumulator<T>>(scale),
          ratio,
          q.size(0) * ratio};
}

template <class T>
unsigned row_blocks(const View<const T>& q, const View<const T>& k) {
  const int64_t rows = q.size(0) * (q.size(1) / k.size(1));
  return static_cast<unsigned>(k.size(1) * ceil_div(rows, kRowsOfDots));
}

template <class T>
bool takes_wgmma(const View<const T>& q_THD, const View<const T>& k_SGD,
                 const View<const T>& v_SGV, const View<const T>& o_THV,
                 double scale) {
  if constexpr (std::is_same_v<T, bf16>) {
    return attention_path(q_THD, k_SGD, v_SGV, o_THV, scale) ==
           AttentionPath::kWgmma;
  }
  return false;
}

}  // namespace

template <class T>
size_t attention_backward_workspace_bytes(const View<const T>& q_THD,
                                          const View<const T>& k_SGD,
                                          const View<const T>& v_SGV,
                                          const View<const T>& o_THV,
                                          double scale) {
  return takes_wgmma<T>(q_THD, k_SGD, v_SGV, o_THV, scale)
             ? attention_backward_plan(q_THD.size(0), q_THD.size(1)).bytes
             : 0;
}

template <class T>
void attention_forward(Launch l, View<const T> q_THD, View<const T> k_SGD,
                       View<const T> v_SGV, KeyRange range, double scale,
                       View<T> o_THV, View<Accumulator<T>> lse_TH) {
  const unsigned blocks = row_blocks(q_THD, k_SGD);
  if (blocks == 0) return;
  if constexpr (std::is_same_v<T, bf16>) {
    if (takes_wgmma<T>(q_THD, k_SGD, v_SGV, o_THV, scale)) {
      return attention_forward_wgmma(l, q_THD, k_SGD, v_SGV, range, scale,
                                     o_THV, lse_TH);
    }
  }
  attention_forward_kernel<T><<<blocks, kTileThreads, 0, stream_of(l)>>>(
      problem(q_THD, k_SGD, v_SGV, range, scale), rows<3>(o_THV),
      rows<2>(lse_TH));
  check_launch("attention_forward");
}

template <class T>
void attention_backward(Launch l, View<const T> do_THV, View<const T> q_THD,
                        View<const T> k_SGD, View<const T> v_SGV,
                        View<const T> o_THV, View<const Accumulator<T>> lse_TH,
                        KeyRange range, double scale, View<T> dq_THD,
                        View<T> dk_SGD, View<T> dv_SGV, std::byte* workspace) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (takes_wgmma<T>(q_THD, k_SGD, v_SGV, o_THV, scale)) {
      return attention_backward_wgmma(l, do_THV, q_THD, k_SGD, v_SGV, o_THV,
                                      lse_TH, range, scale, dq_THD, dk_SGD,
                                      dv_SGV, workspace);
    }
  }
  const Problem<T> p = problem(q_THD, k_SGD, v_SGV, range, scale);
  const unsigned queries = row_blocks(q_THD, k_SGD);
  if (queries > 0) {
    attention_backward_queries_kernel<T>
        <<<queries, kTileThreads, 0, stream_of(l)>>>(
            p, rows<3>(do_THV), rows<3>(o_THV), rows<2>(lse_TH),
            rows<3>(dq_THD));
    check_launch("attention_backward");
  }
  const int64_t keys = k_SGD.size(1) * ceil_div(k_SGD.size(0), kRowsOfDots) *
                       ceil_div(k_SGD.size(2) + v_SGV.size(2), kTileThreads);
  if (keys == 0) return;
  attention_backward_keys_kernel<T>
      <<<static_cast<unsigned>(keys), kTileThreads, 0, stream_of(l)>>>(
          p, rows<3>(do_THV), rows<3>(o_THV), rows<2>(lse_TH), rows<3>(dk_SGD),
          rows<3>(dv_SGV));
  check_launch("attention_backward");
}

#define TAPELINE_ATTENTION(T)                                                  \
  template void attention_forward<T>(Launch, View<const T>, View<const T>,     \
                                     View<const T>, KeyRange, double, View<T>, \
                                     View<Accumulator<T>>);                    \
  template size_t attention_backward_workspace_bytes<T>(                       \
      const View<const T>&, const View<const T>&, const View<const T>&,        \
      const View<const T>&, double);                                           \
  template void attention_backward<T>(                                         \
      Launch, View<const T>, View<const T>, View<const T>, View<const T>,      \
      View<const T>, View<const Accumulator<T>>, KeyRange, double, View<T>,    \
      View<T>, View<T>, std::byte*);
TAPELINE_ATTENTION(float)
TAPELINE_ATTENTION(bf16)
TAPELINE_ATTENTION(double)
#undef TAPELINE_ATTENTION

}  // namespace tapeline::cuda
