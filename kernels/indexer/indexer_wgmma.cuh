// Indexer scores on tensor cores: private to indexer_wgmma.cu and to what times
// its variants.
//
// A block keeps the rows of 256 (query, head) pairs in shared memory and
// streams keys past them, 64 at a time: acc[key, (query, head)] = k . q. A
// thread then holds, for two keys, a quarter of every query's heads; it adds
// w relu(acc) over those, and two exchanges within four lanes finish the sum.
// One warp loads, two warpgroups take alternate tiles: one multiplies while the
// other adds.
#pragma once

#include <cstdint>

#include "kernels/cuda.cuh"
#include "kernels/hopper.cuh"
#include "kernels/indexer/indexer_fast.h"

namespace tapeline::cuda::indexer_detail {

__device__ inline float relu(float x) {  // keeps NaN
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

struct Problem {
  Rows<const float, 2> w_TH;
  Rows<const int32_t, 1> begin, end;
  float scale;
  int tokens, heads, keys, chunk;
  float* scores;
  int64_t scores_stride;
  bool fill;  // write -inf outside of ranges too
};

template <int kDim, int kStages>
struct Shared {
  static constexpr int kPanels = kDim / 64;
  // 256 rows of (query, head), by panels of 64 columns.
  alignas(1024) char q[kPanels][kIndexerColumns * 128];
  alignas(1024) char k[kStages][kPanels][kIndexerTile * 128];
  float w[kIndexerColumns];
  int2 range[kIndexerColumns / 8];  // of each query
  Barrier q_full, full[kStages], empty[kStages];
};

// kHeads is the padded number. Columns of acc count heads fastest.
template <int kHeads, int kDim, int kStages>
__global__ void __launch_bounds__(384, 1)
    score_tiles(const __grid_constant__ CUtensorMap q_map,
                const __grid_constant__ CUtensorMap k_map, Problem x) {
  using S = Shared<kDim, kStages>;
  constexpr int kQueries = kIndexerColumns / kHeads;
  constexpr int kTile = kIndexerTile;
  extern __shared__ __align__(1024) char raw[];
  S& s = *reinterpret_cast<S*>(raw);
  const int tid = static_cast<int>(threadIdx.x);
  const int group = tid / 128;
  const int first_query = static_cast<int>(blockIdx.x) * kQueries;
  const int first_key = static_cast<int>(blockIdx.y) * x.chunk;
  const int last_key = min(x.keys, first_key + x.chunk);

  if (tid == 0) {
    s.q_full.init(1);
    for (int i = 0; i < kStages; ++i) {
      s.full[i].init(1);
      s.empty[i].init(4);  // by each warp of the group that read it
    }
    fence_barriers();
  }
  for (int i = tid; i < kIndexerColumns; i += 384) {
    const int t = first_query + i / kHeads, h = i % kHeads;
    s.w[i] = t < x.tokens && h < x.heads ? x.w_TH(t, h) * x.scale : 0.0f;
  }
  if (tid < kQueries) {
    const int t = first_query + tid;
    int2 r{0, 0};
    if (t < x.tokens) r = int2{x.begin(t), x.end(t)};
    if (r.x >= r.y) r = int2{x.keys, 0};  // changes no union
    s.range[tid] = r;
  }
  __syncthreads();
  // Tiles with a key of some range.
  int low = last_key, high = first_key;
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    low = min(low, s.range[i].x);
    high = max(high, s.range[i].y);
  }
  low = max(first_key, low / kTile * kTile);
  high = min(last_key, high);
  const int tiles = low < high ? (high - low + kTile - 1) / kTile : 0;

  if (group == 2) {
    give_registers<40>();
    if (tid == 256 && tiles > 0) {
      s.q_full.arrive_expect(sizeof s.q);
#pragma unroll
      for (int p = 0; p < S::kPanels; ++p) {
        tma_load(shared_address(s.q[p]), q_map, s.q_full, p * 64, 0,
                 first_query);
      }
      Ring<kStages> ring;
      for (int tile = 0; tile < tiles; ++tile, ring.next()) {
        Barrier& full = s.full[ring.slot];
        s.empty[ring.slot].wait(ring.parity() ^ 1);
        full.arrive_expect(sizeof s.k[0]);
#pragma unroll
        for (int p = 0; p < S::kPanels; ++p) {
          tma_load(shared_address(s.k[ring.slot][p]), k_map, full, p * 64,
                   low + tile * kTile);
        }
      }
    }
    return;
  }
  take_registers<232>();
  if (x.fill) {
    // Keys that no tile covers.
    const int from = tiles > 0 ? low : last_key;
    const int to = tiles > 0 ? min(last_key, low + tiles * kTile) : last_key;
    for (int i = group; i < kQueries; i += 2) {
      if (first_query + i >= x.tokens) break;
      float* row = x.scores + (first_query + i) * x.scores_stride;
      for (int key = first_key + tid % 128; key < from; key += 128) {
        row[key] = -INFINITY;
      }
      for (int key = to + tid % 128; key < last_key; key += 128) {
        row[key] = -INFINITY;
      }
    }
  }
  if (tiles == 0) return;

  const int lane = tid % 32, warp = tid % 128 / 32, c = lane % 4;
  float w[kIndexerColumns / 4];  // of this thread's columns
#pragma unroll
  for (int j = 0; j < kIndexerColumns / 8; ++j) {
    w[2 * j] = s.w[8 * j + 2 * c];
    w[2 * j + 1] = s.w[8 * j + 2 * c + 1];
  }
  const uint64_t q_desc = matrix_descriptor<kMajorK>(shared_address(s.q));
  const uint64_t k_desc = matrix_descriptor<kMajorK>(shared_address(s.k));
  s.q_full.wait(0);
  float acc[kIndexerColumns / 2];
  for (int tile = group; tile < tiles; tile += 2) {
    const int slot = tile % kStages;
    s.full[slot].wait(tile / kStages & 1);
    wgmma_fence();
#pragma unroll
    for (int p = 0; p < S::kPanels; ++p) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint64_t in_panel = step * kDescriptorStep<kMajorK>;
        wgmma<kIndexerColumns, kMajorK, kMajorK>(
            acc,
            k_desc + ((slot * sizeof s.k[0] + p * sizeof s.k[0][0]) >> 4) +
                in_panel,
            q_desc + (p * sizeof s.q[0] >> 4) + in_panel, p == 0 && step == 0);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(acc);
    if (lane == 0) s.empty[slot].arrive();

    // sum[2 i + half] is query i with key g + 8 half.
    constexpr int kSums = 2 * kQueries;
    float sum[kSums];
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v = 0;
#pragma unroll
        for (int j = i * (kHeads / 8); j < (i + 1) * (kHeads / 8); ++j) {
          v = fmaf(w[2 * j], relu(acc[4 * j + 2 * half]), v);
          v = fmaf(w[2 * j + 1], relu(acc[4 * j + 2 * half + 1]), v);
        }
        sum[2 * i + half] = v;
      }
    }
    // Lane c ends up with sums [c kSums / 4, (c + 1) kSums / 4).
#pragma unroll
    for (int u = 0; u < kSums / 2; ++u) {
      const bool upper = (c & 2) != 0;
      const float mine = upper ? sum[u + kSums / 2] : sum[u];
      const float theirs = upper ? sum[u] : sum[u + kSums / 2];
      sum[u] = mine + __shfl_xor_sync(~0u, theirs, 2);
    }
#pragma unroll
    for (int u = 0; u < kSums / 4; ++u) {
      const bool upper = (c & 1) != 0;
      const float mine = upper ? sum[u + kSums / 4] : sum[u];
      const float theirs = upper ? sum[u] : sum[u + kSums / 4];
      sum[u] = mine + __shfl_xor_sync(~0u, theirs, 1);
    }
    const int key0 = low + tile * kTile + warp * 16 + lane / 4;
#pragma unroll
    for (int u = 0; u < kSums / 4; ++u) {
      const int v = c * (kSums / 4) + u;
      const int i = v / 2, key = key0 + v % 2 * 8;
      const int2 r = s.range[i];
      if (first_query + i < x.tokens && key < last_key) {
        const bool in = key >= r.x && key < r.y;
        x.scores[(first_query + i) * x.scores_stride + key] =
            in ? sum[u] : -INFINITY;
      }
    }
  }
}

}  // namespace tapeline::cuda::indexer_detail
