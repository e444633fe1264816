// What the wgmma kernels over selected keys share (sparse attention, the
// indexer's loss): a row's valid ids, and panels of gathered key rows.
#pragma once

#include <cstdint>

#include "kernels/cuda.cuh"
#include "kernels/hopper.cuh"
#include "kernels/sparse_attention/sparse_attention_fast.h"

namespace tapeline::cuda::sparse_detail {

constexpr int kPanels = kMlaDim / 64;            // of a key row
constexpr int kValuePanels = kMlaValueDim / 64;  // its first ones
constexpr int kTileKeys = 64;
constexpr int kPanelBytes = 64 * kPanelRowBytes;  // of 64 rows

// Boxes of 64 heads by 64 columns. A stride that is never taken may be
// anything, but not for TMA.
inline CUtensorMap heads_map(const View<const bf16>& x_THD) {
  const int64_t tokens = x_THD.size(0), heads = x_THD.size(1);
  const int64_t dim = x_THD.size(2);
  const int64_t head_stride = heads > 1 ? x_THD.strides[1] : dim;
  const int64_t stride = tokens > 1 ? x_THD.strides[0] : heads * head_stride;
  return tensor_map(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, x_THD.data,
                    {dim, heads, tokens}, {head_stride * 2, stride * 2},
                    {64, kMlaHeads, 1});
}

// Writes the ids of a row that are key rows side by side, in order, and (where
// `slot` is not null) the slots that they came from; returns their number.
// `parts` [warps] is scratch. Ends with a block barrier.
template <int kThreads>
__device__ int compact_ids(const int32_t* row, int slots, int keys, int32_t* id,
                           uint16_t* slot, int* parts) {
  constexpr int kEach = (kMlaMaxIds + kThreads - 1) / kThreads;
  constexpr int kWarps = kThreads / kWarp;
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % kWarp, warp = tid / kWarp;
  int32_t mine[kEach];
  int count = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int j = tid * kEach + e;
    mine[e] = j < slots ? row[j] : -1;
    if (mine[e] >= keys) mine[e] = -1;
    count += mine[e] >= 0 ? 1 : 0;
  }
  int sum = count;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int below = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += below;
  }
  if (lane == kWarp - 1) parts[warp] = sum;
  __syncthreads();
  int at = sum - count, total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) at += parts[w];
    total += parts[w];
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    if (mine[e] < 0) continue;
    id[at] = mine[e];
    if (slot != nullptr) slot[at] = static_cast<uint16_t>(tid * kEach + e);
    ++at;
  }
  __syncthreads();
  return total;
}

// The part of a loader among 128: piece tid % 8 of rows tid / 8 + 16 i of a
// tile of 64 gathered key rows.
struct Gather {
  const bf16* kv;
  int64_t stride;
  int piece, row0;
  const bf16* from[4];
  bool valid[4];

  __device__ Gather(const bf16* rows, int64_t row_stride, int tid)
      : kv(rows), stride(row_stride), piece(tid % 8), row0(tid / 8) {}

  // Key rows id[first ..], those from `count` on as zeros.
  __device__ void set_tile(const int32_t* id, int first, int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = first + row0 + 16 * i;
      valid[i] = at < count;
      from[i] = kv + (valid[i] ? id[at] * stride : 0) + piece * 8;
    }
  }
  // Panel p of the tile to `to`.
  __device__ void copy_panel(uint32_t to, int p) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      copy_async(to + panel_offset(row0 + 16 * i, piece), from[i] + p * 64,
                 valid[i]);
    }
  }
};

// acc of 64 columns as four bf16 operands of 16 columns each, for wgmma with a
// in registers.
__device__ inline void pack_rows(const float (&acc)[32], uint32_t (&a)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) a[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
}
// Those of 128 threads to a panel at `to`, K-major: row m, 64 columns.
__device__ inline void store_panel(uint32_t to, const uint32_t (&a)[16]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) % 128 / kWarp;
  const int row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    store_matrices(to + panel_offset(row, 2 * k + lane / 16), a[4 * k],
                   a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]);
  }
}

// Lane c of four holds word c of four pieces of 16 bytes; afterwards it holds
// piece c.
__device__ inline void transpose_quad(uint32_t (&v)[4]) {
  const int c = static_cast<int>(threadIdx.x) % 4;
  const bool far = (c & 2) != 0, near = (c & 1) != 0;
  const uint32_t a = __shfl_xor_sync(~0u, far ? v[0] : v[2], 2);
  const uint32_t b = __shfl_xor_sync(~0u, far ? v[1] : v[3], 2);
  // Words c % 2 and c % 2 + 2 of the pieces 0 and 1, or 2 and 3.
  const uint32_t low0 = far ? a : v[0], high0 = far ? v[2] : a;
  const uint32_t low1 = far ? b : v[1], high1 = far ? v[3] : b;
  const uint32_t x = __shfl_xor_sync(~0u, near ? low0 : low1, 1);
  const uint32_t y = __shfl_xor_sync(~0u, near ? high0 : high1, 1);
  v[0] = near ? x : low0;
  v[1] = near ? low1 : x;
  v[2] = near ? y : high0;
  v[3] = near ? high1 : y;
}

}  // namespace tapeline::cuda::sparse_detail
