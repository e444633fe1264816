// Both gradients of a norm over rows in one pass over x and dy, of which two
// passes would read both twice. norm_plan.h says how rows are shared.
//
// A norm is a struct of Terms:
//   Row row(i)                 the statistics of row i
//   means(m, g, x, row)        adds what g = dy w and x of an element add to
//                              kMeans sums of its row
//   Line line(m, row)          of these, divided by the row's length:
//     A line(dy, w, x, add)    dx of an element; add[s] is what it adds to
//                              kSums sums of its column
//
// Tiles of rows come by bulk copies into a ring, so that reading goes on while
// rows wait for their means; short rows stay in registers, the next ones as
// well. The sums of a column are added row by row of a
// lane, then lane by lane of a block, then in the order of the blocks: the
// order follows from the shape.
#pragma once

#include "kernels/cuda_launch.cuh"
#include "kernels/cuda_rows.cuh"
#include "kernels/hopper.cuh"
#include "kernels/norm_plan.h"

namespace tapeline::cuda {

// A pack as four words. Elements of 16 bits that are kept as such take a
// register each; in words, two share one, and one operation widens either.
template <class T>
struct Words {
  static constexpr int kSize = Pack<T>::kSize;
  uint32_t at[4] = {};

  __device__ static Words load(const T* row, int pack) {
    const uint4 v = reinterpret_cast<const uint4*>(row)[pack];
    return {{v.x, v.y, v.z, v.w}};
  }
  __device__ void store(T* row, int pack) const {
    reinterpret_cast<uint4*>(row)[pack] = {at[0], at[1], at[2], at[3]};
  }
  // Element k, a constant.
  __device__ Accumulator<T> operator[](int k) const {
    if constexpr (std::is_same_v<T, bf16>) {
      return __uint_as_float(k % 2 == 0 ? at[k / 2] << 16
                                        : at[k / 2] & 0xffff0000u);
    } else if constexpr (std::is_same_v<T, float>) {
      return __uint_as_float(at[k]);
    } else {
      return __hiloint2double(static_cast<int>(at[2 * k + 1]),
                              static_cast<int>(at[2 * k]));
    }
  }
  // From here on elements are widened anew: kept wide, they would take twice
  // the registers.
  __device__ void narrow() {
#pragma unroll
    for (uint32_t& word : at) asm volatile("" : "+r"(word));
  }
  __device__ static Words rounded(const Accumulator<T> (&value)[kSize]) {
    Words out;
    if constexpr (std::is_same_v<T, bf16>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        out.at[i] = pack_bf16(value[2 * i], value[2 * i + 1]);
      }
    } else {
      memcpy(out.at, value, sizeof(out.at));
    }
    return out;
  }
};

// A plan's numbers as constants.
template <int kThreads_, int kBlocks_, int kLanes_, int kHeld_, int kEach_,
          int kTiles_>
struct NormTile {
  static constexpr int kThreads = kThreads_, kBlocks = kBlocks_;
  static constexpr int kLanes = kLanes_, kHeld = kHeld_, kEach = kEach_;
  static constexpr int kTiles = kTiles_;
  static constexpr int kGroups = kThreads / kLanes;
  static constexpr int kRows = kGroups * kEach;
};

template <class Tile, class Terms, class T>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    norm_gradients(Terms terms, Rows<const T, 2> dy_ND, Rows<const T, 2> x_ND,
                   const T* w, Rows<T, 2> dx_ND, Accumulator<T>* partial) {
  using A = Accumulator<T>;
  constexpr int kN = Words<T>::kSize, kThreads = Tile::kThreads;
  constexpr int kLanes = Tile::kLanes, kHeld = Tile::kHeld;
  constexpr int kEach = Tile::kEach, kGroups = Tile::kGroups;
  constexpr int kRows = Tile::kRows, kTiles = Tile::kTiles;
  constexpr int kMeans = Terms::kMeans, kSums = Terms::kSums;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ Barrier full[kTiles];
  __shared__ A parts[2][kThreads / kWarp][kEach * kMeans];
  const int n = static_cast<int>(x_ND.size[0]);  // norm_plan() sees to that
  const int d = static_cast<int>(x_ND.size[1]), packs = d / kN;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const uint32_t row_bytes = static_cast<uint32_t>(d) * sizeof(T);
  const uint32_t tile_bytes = kRows * row_bytes;
  const int tiles = (n + kRows - 1) / kRows;
  const int step = static_cast<int>(gridDim.x);
  const bool dense = x_ND.stride[0] == d && dy_ND.stride[0] == d;

  if (threadIdx.x == 0) {
    for (Barrier& barrier : full) barrier.init(1);
    fence_barriers();
  }
  __syncthreads();
  wait_for_earlier();
  let_next_begin();
  // By the first warp. A tile's rows of x, then those of dy.
  const auto fetch = [&](int tile, int slot) {
    if (tile >= tiles) return;
    const int first = tile * kRows, count = min(kRows, n - first);
    const uint32_t to = shared_address(shared) + slot * 2 * tile_bytes;
    if (threadIdx.x == 0) full[slot].arrive_expect(2 * count * row_bytes);
    __syncwarp();
    if (dense) {
      if (threadIdx.x != 0) return;
      bulk_load(to, x_ND.row(first), count * row_bytes, full[slot]);
      bulk_load(to + tile_bytes, dy_ND.row(first), count * row_bytes,
                full[slot]);
      return;
    }
    for (int r = threadIdx.x; r < count; r += kWarp) {
      bulk_load(to + r * row_bytes, x_ND.row(first + r), row_bytes, full[slot]);
      bulk_load(to + tile_bytes + r * row_bytes, dy_ND.row(first + r),
                row_bytes, full[slot]);
    }
  };
  const int first_tile = static_cast<int>(blockIdx.x);
  if (warp == 0) {
    for (int s = 0; s + 1 < kTiles; ++s) fetch(first_tile + s * step, s);
  }

  Words<T> scale[kHeld];
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
    const int j = lane + h * kLanes;
    if (j < packs) scale[h] = Words<T>::load(w, j);
  }
  using Row = typename Terms::Row;
  Row next[kEach];
  const auto load_rows = [&](int tile) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = tile * kRows + e * kGroups + group;
      next[e] = tile < tiles && i < n ? terms.row(i) : Row{};
    }
  };
  load_rows(first_tile);
  A sum[kSums][kHeld][kN] = {};
  Ring<kTiles> ring;
  int side = 0;
  for (int tile = first_tile; tile < tiles; tile += step) {
    Row row[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) row[e] = next[e];
    load_rows(tile + step);
    full[ring.slot].wait(ring.parity());
    const T* const x_tile =
        reinterpret_cast<const T*>(shared + ring.slot * 2 * tile_bytes);
    const T* const dy_tile = x_tile + kRows * d;
    A mean[kEach][kMeans] = {};
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int r = e * kGroups + group;
#pragma unroll
      for (int h = 0; h < kHeld; ++h) {
        const int j = lane + h * kLanes;
        if (tile * kRows + r >= n || j >= packs) continue;
        const Words<T> x = Words<T>::load(x_tile + r * d, j);
        const Words<T> dy = Words<T>::load(dy_tile + r * d, j);
#pragma unroll
        for (int k = 0; k < kN; ++k) {
          terms.means(mean[e], dy[k] * scale[h][k], x[k], row[e]);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
#pragma unroll
      for (int m = 0; m < kMeans; ++m) {
        constexpr int kShared = kLanes < kWarp ? kLanes : kWarp;
#pragma unroll
        for (int s = kShared / 2; s > 0; s /= 2) {
          mean[e][m] += __shfl_xor_sync(~0u, mean[e][m], s);
        }
        if (kLanes > kWarp && threadIdx.x % kWarp == 0) {
          parts[side][warp][e * kMeans + m] = mean[e][m];
        }
      }
    }
    __syncthreads();  // and everyone is done with the tile before this one
    if (warp == 0) {
      fetch(tile + (kTiles - 1) * step,
            ring.slot == 0 ? kTiles - 1 : ring.slot - 1);
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
#pragma unroll
      for (int m = 0; m < kMeans; ++m) {
        if constexpr (kLanes > kWarp) {
          constexpr int kOfRow = kLanes / kWarp;
          mean[e][m] = 0;
#pragma unroll
          for (int v = 0; v < kOfRow; ++v) {
            mean[e][m] += parts[side][group * kOfRow + v][e * kMeans + m];
          }
        }
        mean[e][m] /= static_cast<A>(d);
      }
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int r = e * kGroups + group, i = tile * kRows + r;
      const auto line = terms.line(mean[e], row[e]);
#pragma unroll
      for (int h = 0; h < kHeld; ++h) {
        const int j = lane + h * kLanes;
        if (i >= n || j >= packs) continue;
        // Again, which costs less than registers for it.
        const Words<T> x = Words<T>::load(x_tile + r * d, j);
        const Words<T> dy = Words<T>::load(dy_tile + r * d, j);
        A dx[kN];
#pragma unroll
        for (int k = 0; k < kN; ++k) {
          A add[kSums];
          dx[k] = line(dy[k], scale[h][k], x[k], add);
#pragma unroll
          for (int s = 0; s < kSums; ++s) sum[s][h][k] += add[s];
        }
        Words<T>::rounded(dx).store(dx_ND.row(i), j);
      }
    }
    ring.next();
    side ^= 1;
  }

  // The tiles' memory takes the sums of the groups.
  __syncthreads();
  A* const of_groups = reinterpret_cast<A*>(shared);
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int j = lane + h * kLanes;
      if (j >= packs) continue;
#pragma unroll
      for (int k = 0; k < kN; ++k) {
        of_groups[(group * kSums + s) * d + j * kN + k] = sum[s][h][k];
      }
    }
  }
  __syncthreads();
  A* const out = partial + int64_t{blockIdx.x} * kSums * d;
  for (int c = threadIdx.x; c < kSums * d; c += kThreads) {
    A total = 0;
    for (int g = 0; g < kGroups; ++g) total += of_groups[g * kSums * d + c];
    out[c] = total;
  }
}

// The same for rows of a pack for each lane of a warp at most: lanes read their
// own, and no warp waits for another.
template <class Tile, class Terms, class T>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    norm_gradients_short(Terms terms, Rows<const T, 2> dy_ND,
                         Rows<const T, 2> x_ND, const T* w, Rows<T, 2> dx_ND,
                         Accumulator<T>* partial) {
  using A = Accumulator<T>;
  using Row = typename Terms::Row;
  constexpr int kN = Words<T>::kSize, kThreads = Tile::kThreads;
  constexpr int kLanes = Tile::kLanes, kEach = Tile::kEach;
  constexpr int kGroups = Tile::kGroups, kRows = Tile::kRows;
  constexpr int kMeans = Terms::kMeans, kSums = Terms::kSums;
  static_assert(kLanes <= kWarp && Tile::kHeld == 1);
  __shared__ A of_groups[kGroups][kSums][kN][kLanes];
  const int n = static_cast<int>(x_ND.size[0]);  // norm_plan() sees to that
  const int d = static_cast<int>(x_ND.size[1]);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const bool inside = lane * kN < d;
  wait_for_earlier();
  let_next_begin();
  Words<T> scale;
  if (inside) scale = Words<T>::load(w, lane);
  Words<T> next_x[kEach], next_dy[kEach];
  Row next[kEach];
  const auto load = [&](int first) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int i = first + e * kGroups + group;
      next[e] = {};
      next_x[e] = next_dy[e] = {};
      if (i >= n) continue;
      next[e] = terms.row(i);
      if (inside) {
        next_x[e] = Words<T>::load(x_ND.row(i), lane);
        next_dy[e] = Words<T>::load(dy_ND.row(i), lane);
      }
    }
  };
  const int step = static_cast<int>(gridDim.x) * kRows;
  A sum[kSums][kN] = {};
  load(static_cast<int>(blockIdx.x) * kRows);
  for (int first = static_cast<int>(blockIdx.x) * kRows; first < n;
       first += step) {
    Words<T> x[kEach], dy[kEach];
    Row row[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      x[e] = next_x[e];
      dy[e] = next_dy[e];
      row[e] = next[e];
    }
    load(first + step);
    A mean[kEach][kMeans] = {};
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
#pragma unroll
      for (int k = 0; k < kN; ++k) {
        terms.means(mean[e], dy[e][k] * scale[k], x[e][k], row[e]);
      }
    }
#pragma unroll
    for (int s = kLanes / 2; s > 0; s /= 2) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
#pragma unroll
        for (int m = 0; m < kMeans; ++m) {
          mean[e][m] += __shfl_xor_sync(~0u, mean[e][m], s);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      x[e].narrow();
      dy[e].narrow();
#pragma unroll
      for (int m = 0; m < kMeans; ++m) mean[e][m] /= static_cast<A>(d);
      const auto line = terms.line(mean[e], row[e]);
      A dx[kN];
#pragma unroll
      for (int k = 0; k < kN; ++k) {
        A add[kSums];
        dx[k] = line(dy[e][k], scale[k], x[e][k], add);
#pragma unroll
        for (int s = 0; s < kSums; ++s) sum[s][k] += add[s];
      }
      const int i = first + e * kGroups + group;
      if (i < n && inside) Words<T>::rounded(dx).store(dx_ND.row(i), lane);
    }
  }
  // By element of a pack, then lane, which spreads a warp over all banks.
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
#pragma unroll
    for (int k = 0; k < kN; ++k) of_groups[group][s][k][lane] = sum[s][k];
  }
  __syncthreads();
  A* const out = partial + int64_t{blockIdx.x} * kSums * d;
  for (int c = threadIdx.x; c < kSums * kN * kLanes; c += kThreads) {
    const int j = c % kLanes * kN + c / kLanes % kN, s = c / (kLanes * kN);
    A total = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) total += (&of_groups[g][0][0][0])[c];
    if (j < d) out[s * d + j] = total;
  }
}

// out[s][j] += the sum over parts of partial[part][s][j]. A block has 32
// columns of one sum; 32 threads share each: thread g adds parts g, g + 32, ..,
// the first of them then the 32 sums.
constexpr int kPartThreads = 1024;
template <class A, int kSums>
__global__ void __launch_bounds__(kPartThreads)
    add_norm_parts(int parts, int64_t d, const A* partial,
                   ColumnOutputs<A, kSums> out) {
  constexpr int kAtOnce = (kMostNormParts + kWarp - 1) / kWarp;
  __shared__ A sums[kWarp][kWarp + 1];
  const int column = static_cast<int>(threadIdx.x) % kWarp;
  const int group = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t j = int64_t{blockIdx.x} * kWarp + column, s = blockIdx.y;
  wait_for_earlier();
  A value[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int part = group + i * kWarp;
    value[i] =
        part < parts && j < d ? partial[(part * kSums + s) * d + j] : A(0);
  }
  A sum = 0;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) sum += value[i];
  sums[group][column] = sum;
  __syncthreads();
  if (group != 0 || j >= d) return;
  A total = 0;
#pragma unroll
  for (int g = 0; g < kWarp; ++g) total += sums[g][column];
  out.at[s](j) += total;
}

// f<NormTile>() for a plan of norm_plan().
template <class F>
void by_norm_plan(const NormPlan& plan, F f) {
  bool found = false;
  const auto try_one = [&]<class Tile>() {
    const NormPlan one = {Tile::kThreads, Tile::kBlocks, Tile::kLanes,
                          Tile::kHeld,    Tile::kEach,   Tile::kTiles,
                          plan.parts};
    if (found || !(one == plan)) return;
    found = true;
    f.template operator()<Tile>();
  };
  try_one.template operator()<NormTile<256, 2, 16, 1, 4, 0>>();
  try_one.template operator()<NormTile<256, 2, 32, 1, 4, 0>>();
  try_one.template operator()<NormTile<256, 2, 32, 2, 2, 3>>();
  try_one.template operator()<NormTile<512, 2, 128, 1, 1, 4>>();
  try_one.template operator()<NormTile<512, 2, 256, 1, 1, 4>>();
  try_one.template operator()<NormTile<512, 2, 512, 1, 1, 4>>();
  try_one.template operator()<NormTile<512, 1, 512, 2, 1, 6>>();
  CHECK(found) << "no tile for " << plan;
}

// partial [plan.parts, kSums, D] is overwritten.
template <class Terms, class T>
void launch_norm_gradients(const Launch& l, const NormPlan& plan,
                           const Terms& terms, const View<const T>& dy,
                           const View<const T>& x, const View<const T>& w,
                           const View<T>& dx,
                           const View<Accumulator<T>>& partial) {
  by_norm_plan(plan, [&]<class Tile>() {
    const dim3 blocks(static_cast<unsigned>(plan.parts));
    const auto start = [&](auto kernel, size_t bytes) {
      launch_early(l, kernel, blocks, Tile::kThreads, bytes, 1, terms,
                   rows<2>(dy), rows<2>(x), w.data, rows<2>(dx), partial.data);
    };
    if constexpr (Tile::kTiles == 0) {
      return start(norm_gradients_short<Tile, Terms, T>, 0);
    } else {
      const auto kernel = norm_gradients<Tile, Terms, T>;
      const int64_t row_bytes = x.size(1) * static_cast<int64_t>(sizeof(T));
      const int64_t sums = int64_t{Tile::kGroups} * Terms::kSums * x.size(1) *
                           static_cast<int64_t>(sizeof(Accumulator<T>));
      const auto bytes = static_cast<int>(
          std::max(Tile::kTiles * 2 * Tile::kRows * row_bytes, sums));
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           bytes);
      start(kernel, static_cast<size_t>(bytes));
    }
  });
}

template <class A, int kSums>
void launch_add_norm_parts(const Launch& l, const View<const A>& partial,
                           int64_t d, const ColumnOutputs<A, kSums>& out) {
  CHECK_LE(partial.size(0), kMostNormParts);
  const dim3 blocks(static_cast<unsigned>(ceil_div(d, kWarp)), kSums);
  launch_early(l, add_norm_parts<A, kSums>, blocks, kPartThreads, 0, 1,
               static_cast<int>(partial.size(0)), d, partial.data, out);
}

}  // namespace tapeline::cuda
