// Products through shared memory, for kernels that must be right at any size.
//
//   Tile        64 x 64 elements of a product, four by four a thread
//   dots        16 rows times 64 columns of factors that are rows both
//   RowSoftmax  a softmax of 16 rows over tiles of 64 scores
//   add_rows    what 16 coefficients times a value add to 16 sums
//   SelectedTiles  a query's valid ids, 64 at a time; HeadTile, 16 heads of it
//
// All are called by every thread of a block of kTileThreads. An element is one
// chain of fused operations over k = 0, 1, ..., so its bits follow from its own
// terms alone, never from the tile, the grid or its neighbours: a score has the
// same bits wherever it is computed again.
#pragma once

#include "kernels/cuda.cuh"

namespace tapeline::cuda {

constexpr int kTileThreads = 256;
constexpr int kTile = 64;  // rows and columns of a Tile; keys of dots
constexpr int kRowsOfDots = 16;
constexpr int kMaxWidth = 640;  // of a head
// A thread owns this many columns of the widest head.
constexpr int kColumns = (kMaxWidth + kTileThreads - 1) / kTileThreads;

// A rounded product, which is not fused with an addition.
__device__ inline float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double mul(double a, double b) { return __dmul_rn(a, b); }
// Like fmax, NaN gives way to a number.
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double larger(double a, double b) { return fmax(a, b); }
template <class A>
__device__ A infinity() {
  return static_cast<A>(__int_as_float(0x7f800000));
}

// --- 64 x 64 -----------------------------------------------------------------

template <class A>
class Tile {
 public:
  static constexpr int kEach = 4;
  static constexpr int kDepth = 16;

  // The thread's i-th row and j-th column.
  __device__ static int row(int i) {
    return static_cast<int>(threadIdx.x) / 16 * kEach + i;
  }
  __device__ static int column(int j) {
    return static_cast<int>(threadIdx.x) % 16 * kEach + j;
  }

  A at[kEach][kEach] = {};

  // at += sum_k a(row, k) b(column, k). The functions give zero outside of
  // their rows. `along_k`: elements of one row lie side by side, so that
  // neighbouring threads load along k.
  template <class LoadA, class LoadB>
  __device__ void add(int64_t depth, bool a_along_k, LoadA a, bool b_along_k,
                      LoadB b) {
    // Four more columns keep rows on 16 bytes and spread them over the banks.
    __shared__ alignas(16) A a_tile[kDepth][kTile + 4];
    __shared__ alignas(16) A b_tile[kDepth][kTile + 4];
    for (int64_t first = 0; first < depth; first += kDepth) {
      fill(a_tile, first, depth, a_along_k, a);
      fill(b_tile, first, depth, b_along_k, b);
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kDepth; ++k) {
        A x[kEach], y[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) x[i] = a_tile[k][row(i)];
#pragma unroll
        for (int j = 0; j < kEach; ++j) y[j] = b_tile[k][column(j)];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
#pragma unroll
          for (int j = 0; j < kEach; ++j) at[i][j] = fma(x[i], y[j], at[i][j]);
        }
      }
      __syncthreads();
    }
  }

 private:
  template <class Load>
  __device__ static void fill(A (&tile)[kDepth][kTile + 4], int64_t first,
                              int64_t depth, bool along_k, Load load) {
    constexpr int kElements = kDepth * kTile;
#pragma unroll
    for (int i = 0; i < kElements / kTileThreads; ++i) {
      const int at = i * kTileThreads + static_cast<int>(threadIdx.x);
      const int k = along_k ? at % kDepth : at / kTile;
      const int m = along_k ? at / kDepth : at % kTile;
      tile[k][m] = first + k < depth ? load(m, first + k) : A(0);
    }
  }
};

// --- 16 x 64 -----------------------------------------------------------------

// sum[i] = sum_d a(m, d) b(n + 16 i, d) for the thread's m = threadIdx.x / 16
// and n = threadIdx.x % 16. Ends after a barrier.
template <class A, class LoadA, class LoadB>
__device__ void dots(int64_t depth, LoadA a, LoadB b, A (&sum)[4]) {
  constexpr int kDepth = 32;
  __shared__ A a_tile[kRowsOfDots][kDepth + 1], b_tile[kTile][kDepth + 1];
  const int thread = threadIdx.x, m = thread / 16, n = thread % 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = 0;
  for (int64_t first = 0; first < depth; first += kDepth) {
    const int d = thread % kDepth;
    const bool inside = first + d < depth;
    for (int r = thread / kDepth; r < kRowsOfDots; r += kTileThreads / kDepth) {
      a_tile[r][d] = inside ? a(r, first + d) : A(0);
    }
    for (int r = thread / kDepth; r < kTile; r += kTileThreads / kDepth) {
      b_tile[r][d] = inside ? b(r, first + d) : A(0);
    }
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < kDepth; ++k) {
      const A x = a_tile[m][k];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[i] = fma(x, b_tile[n + 16 * i][k], sum[i]);
      }
    }
    __syncthreads();
  }
}

// Coefficients of 16 rows for each of 64 columns, laid out for add_rows: 16
// bytes apart and spread over the banks.
template <class A>
using Coefficients = A[kTile][kRowsOfDots + 4];

// sum[m] += coefficient[m] value
template <class A>
__device__ void add_rows(const A* coefficient, A value, A (&sum)[kRowsOfDots]) {
#pragma unroll
  for (int m = 0; m < kRowsOfDots; ++m) {
    sum[m] = fma(coefficient[m], value, sum[m]);
  }
}
// The same for the rows of which `rows` has the bit, so that a NaN stays with
// those that see it.
template <class A>
__device__ void add_rows(const A* coefficient, A value, unsigned rows,
                         A (&sum)[kRowsOfDots]) {
  if (rows == (1u << kRowsOfDots) - 1) return add_rows(coefficient, value, sum);
#pragma unroll
  for (int m = 0; m < kRowsOfDots; ++m) {
    if (rows >> m & 1) sum[m] = fma(coefficient[m], value, sum[m]);
  }
}

// What `op` makes of the values of the 16 threads that share a row, in each.
template <class A, class Op>
__device__ A row_reduce(A value, Op op) {
#pragma unroll
  for (int step = 8; step > 0; step /= 2) {
    value = op(value, __shfl_xor_sync(~0u, value, step));
  }
  return value;
}
template <class A>
__device__ A row_sum(A value) {
  return row_reduce(value, [](A a, A b) { return a + b; });
}

// Softmax of the row of the thread's dots, whose scores come in tiles. The 16
// threads of a row hold the same state (Milakov & Gimelshein 2018).
template <class A>
class RowSoftmax {
 public:
  // Turns raw scores into exp(scale x - max) under the largest so far, those
  // that are not `in` into 0; returns the factor that brings what was summed
  // before to this maximum.
  __device__ A add(A (&x)[4], const bool (&in)[4], A scale) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const unsigned any = __ballot_sync(~0u, in[0] || in[1] || in[2] || in[3]);
    A max = max_;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = mul(x[i], scale);
      if (in[i]) max = larger(max, x[i]);
    }
    max = row_reduce(max, [](A a, A b) { return larger(a, b); });
    A sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = in[i] ? exp(x[i] - max) : A(0);
      sum += x[i];
    }
    sum = row_sum(sum);
    if ((any >> (lane & 16) & 0xffffu) == 0) return 1;
    const A shrink = exp(max_ - max);
    total_ = fma(total_, shrink, sum);
    max_ = max;
    return shrink;
  }

  // 0 for a row without scores.
  __device__ A inverse() const { return total_ == 0 ? A(0) : A(1) / total_; }
  // log sum exp, natural; +inf for a row without scores.
  __device__ A lse() const {
    return total_ == 0 ? infinity<A>() : max_ + log(total_);
  }

 private:
  A max_ = -infinity<A>();
  A total_ = 0;
};

// a . b of length n, shared by kThreads neighbouring threads of a warp, in each
// of them.
template <int kThreads, class T>
__device__ Accumulator<T> shared_dot(const T* a, const T* b, int64_t n) {
  Accumulator<T> sum = 0;
  for (int64_t i = threadIdx.x % kThreads; i < n; i += kThreads) {
    sum = fma(load(a[i]), load(b[i]), sum);
  }
#pragma unroll
  for (int step = kThreads / 2; step > 0; step /= 2) {
    sum += __shfl_xor_sync(~0u, sum, step);
  }
  return sum;
}

// --- selected keys -----------------------------------------------------------

// The valid ids of one row in tiles of kTile, the last one shorter: -1 takes no
// place, so tiles do not depend on where it stands.
class SelectedTiles {
 public:
  struct Shared {
    // At most kTile - 1 left over and kTileThreads new.
    static constexpr int kSize = 512;
    int32_t id[kSize], slot[kSize];
    int counts[kTileThreads / kWarp];
  };

  __device__ SelectedTiles(Shared& shared, const int32_t* ids, int64_t k)
      : shared_(shared), ids_(ids), k_(k) {}

  // The number of ids of the next tile, 0 behind the last. Holds a barrier.
  __device__ int next() {
    constexpr int kWarps = kTileThreads / kWarp;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    head_ += count_;
    while (tail_ - head_ < kTile && read_ < k_) {
      const int64_t j = read_ + threadIdx.x;
      const int32_t id = j < k_ ? ids_[j] : -1;
      const unsigned valid = __ballot_sync(~0u, id >= 0);
      __syncthreads();  // the tile before is no longer in use
      if (lane == 0) shared_.counts[warp] = __popc(valid);
      __syncthreads();
      int at = tail_ + __popc(valid & ((1u << lane) - 1));
      for (int w = 0; w < kWarps; ++w) {
        at += w < warp ? shared_.counts[w] : 0;
        tail_ += shared_.counts[w];
      }
      if (id >= 0) {
        shared_.id[at % Shared::kSize] = id;
        shared_.slot[at % Shared::kSize] = static_cast<int32_t>(j);
      }
      read_ += kTileThreads;
    }
    __syncthreads();
    count_ = min(kTile, tail_ - head_);
    return count_;
  }

  // Of the j-th of the tile.
  __device__ int32_t id(int j) const {
    return shared_.id[(head_ + j) % Shared::kSize];
  }
  __device__ int32_t slot(int j) const {
    return shared_.slot[(head_ + j) % Shared::kSize];
  }
  // How many stood before the tile.
  __device__ int before() const { return head_; }
  // Whether the tile, if it is the first, is all there is.
  __device__ bool last() const {
    return read_ >= k_ && tail_ == head_ + count_;
  }

 private:
  Shared& shared_;
  const int32_t* ids_;
  const int64_t k_;
  int64_t read_ = 0;
  int head_ = 0, tail_ = 0, count_ = 0;
};

// Sixteen heads of one query.
struct HeadTile {
  int64_t t, first;
  int heads;  // of them that exist

  __device__ static HeadTile of_block(int64_t all_heads) {
    const int64_t tiles = ceil_div(all_heads, kRowsOfDots);
    const int64_t first = blockIdx.x % tiles * kRowsOfDots;
    return {blockIdx.x / tiles, first,
            static_cast<int>(min(int64_t{kRowsOfDots}, all_heads - first))};
  }
};

// What dots loads: element d of head m, or of the tile's n-th key; zero where
// there is none.
template <class T>
__device__ auto heads_of(const Rows<const T, 3>& x_THD, const HeadTile& tile) {
  return [=](int m, int64_t d) {
    return m < tile.heads
               ? Accumulator<T>(load(x_THD(tile.t, tile.first + m, d)))
               : Accumulator<T>(0);
  };
}
template <class T>
__device__ auto keys_of(const Rows<const T, 2>& x_SD, const SelectedTiles& keys,
                        int count) {
  return [=](int n, int64_t d) {
    return n < count ? Accumulator<T>(load(x_SD(keys.id(n), d)))
                     : Accumulator<T>(0);
  };
}

}  // namespace tapeline::cuda
