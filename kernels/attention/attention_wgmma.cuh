// What the wgmma kernels of attention share: ranges of a tile, the order of
// blocks, and rows between registers, shared memory and TMA.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <type_traits>

#include "kernels/attention/key_range.h"
#include "kernels/cuda.cuh"
#include "kernels/hopper.cuh"

namespace tapeline::cuda::attention_detail {

constexpr int kThreads = 384;  // two warpgroups multiply, one loads
constexpr int kLoader = 2;

// 168 a thread at launch: 384 * 168 = 128 * 24 + 256 * 240.
constexpr int kLoaderRegisters = 24;
constexpr int kMathRegisters = 240;

// Heads whose rows stay in L2 together are taken together: in each section all
// tiles of its heads, heads side by side.
struct Order {
  int tiles, heads, section;  // section: heads

  struct Place {
    int tile, head;
  };
  __device__ Place at(int block) const {
    const int whole = section * tiles;
    const int first = block / whole * section;
    const int within = block % whole;
    const int high = min(section, heads - first);
    return {within / high, first + within % high};
  }
};
// Of `heads` heads in groups of `ratio` that share `bytes` of rows.
inline Order order_of(int64_t tiles, int64_t heads, int64_t ratio,
                      int64_t bytes) {
  constexpr int64_t kL2 = 28 << 20;  // of 50 MiB
  const int64_t groups =
      std::max<int64_t>(1, kL2 / std::max<int64_t>(1, bytes));
  return {static_cast<int>(tiles), static_cast<int>(heads),
          static_cast<int>(std::min(heads, groups * ratio))};
}

struct Ranges {
  const int32_t* begin;
  const int32_t* end;
  int64_t begin_stride, end_stride;
  int tokens;

  // {0, 0} for a row that sees nothing.
  __device__ int2 row(int t) const {
    if (t >= tokens) return {0, 0};
    const int b = begin[t * begin_stride], e = end[t * end_stride];
    return b < e ? int2{b, e} : int2{0, 0};
  }
};
inline Ranges ranges_of(const KeyRange& range, int64_t tokens) {
  return {range.begin.data, range.end.data, range.begin.strides[0],
          range.end.strides[0], static_cast<int>(tokens)};
}

// Of some queries: what any of them sees lies in [begin, end), and all of them
// see [all_begin, all_end).
struct Seen {
  int begin, end, all_begin, all_end;

  __device__ static Seen of(int2 row, bool real) {
    const bool some = row.x < row.y;
    return {some ? row.x : INT_MAX, row.y, real ? row.x : 0,
            real ? row.y : INT_MAX};
  }
  __device__ void add(const Seen& x) {
    begin = min(begin, x.begin);
    end = max(end, x.end);
    all_begin = max(all_begin, x.all_begin);
    all_end = min(all_end, x.all_end);
  }
  // Over the lanes of a warp, in each of them.
  __device__ void join() {
    begin = __reduce_min_sync(~0u, begin);
    end = __reduce_max_sync(~0u, end);
    all_begin = __reduce_max_sync(~0u, all_begin);
    all_end = __reduce_min_sync(~0u, all_end);
  }
  __device__ bool all_see(int first, int keys) const {
    return all_begin <= first && first + keys <= all_end;
  }
};

// acc of kColumns columns as bf16 operands of 16 columns each.
template <int kSize>
__device__ __forceinline__ void pack_rows(const float (&acc)[kSize],
                                          uint32_t (&a)[kSize / 2]) {
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) {
    a[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
  }
}

// Columns 64 panel .. of a warpgroup's 64 rows, scaled by row, to the panel at
// `to`; each warp writes the rows that its multiplies read as `a`.
template <int kSize>
__device__ __forceinline__ void store_panel(uint32_t to,
                                            const float (&acc)[kSize],
                                            int panel, float low, float high) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int row = static_cast<int>(threadIdx.x) % 128 / kWarp * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const float* v = acc + (panel * 8 + j) * 4;
    store_matrices(
        to + panel_offset(row, j + lane / 16),
        pack_bf16(v[0] * low, v[1] * low), pack_bf16(v[2] * high, v[3] * high),
        pack_bf16(v[4] * low, v[5] * low), pack_bf16(v[6] * high, v[7] * high));
  }
}

// Zeroes all rows but [from, to) of `panels` panels of `rows` rows, by one
// warpgroup; 0 times what stood there would be NaN if that was. The other
// warpgroup may do the same at the same time. `barrier` is this warpgroup's.
__device__ inline void zero_rows(uint32_t at, int panels, int rows, int from,
                                 int to, int barrier) {
  for (int i = static_cast<int>(threadIdx.x) % 128; i < rows * 8; i += 128) {
    const int row = i / 8;
    if (row >= from && row < to) continue;
    for (int p = 0; p < panels; ++p) {
      store_shared(at + p * rows * kPanelRowBytes + i * 16, uint4{0, 0, 0, 0});
    }
  }
  fence_async();
  named_barrier_sync(barrier, 128);
}

// Boxes of 64 columns and `rows` rows of one head of x [N, heads, columns].
template <class T>
CUtensorMap head_map(const View<T>& x, int rows) {
  // A stride that is never taken may be anything, but not for TMA.
  const int64_t head_stride = x.size(1) > 1 ? x.strides[1] : x.size(2);
  const int64_t stride = x.size(0) > 1 ? x.strides[0] : x.size(1) * head_stride;
  return tensor_map(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, x.data,
                    {x.size(2), x.size(1), x.size(0)},
                    {head_stride * 2, stride * 2}, {64, 1, rows});
}
// kPanels boxes side by side, to panels of kRows rows.
template <int kPanels, int kRows>
__device__ __forceinline__ void load_rows(uint32_t to, const CUtensorMap& map,
                                          Barrier& barrier, int head, int row) {
#pragma unroll
  for (int p = 0; p < kPanels; ++p) {
    tma_load(to + p * kRows * kPanelRowBytes, map, barrier, p * 64, head, row);
  }
}

template <class Kernel>
void allow_shared(Kernel kernel, int bytes) {
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  CHECK(error == cudaSuccess) << cudaGetErrorString(error);
}

}  // namespace tapeline::cuda::attention_detail
