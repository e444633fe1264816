// The backward kernels: private to attention_backward_wgmma.cu and to what
// times them.
//
//   prepare     delta = do . o of every row, and what every 64 queries see
//   query_tiles a block has 128 queries of one head and walks their keys: dq
//   key_tiles   a block has 64 or 128 keys and walks the heads that share them,
//               and the queries of each that see them: dk, dv
//
// Scores and their gradients are made twice, so no sum has more than one writer
// or an order that depends on time. In key_tiles everything is transposed:
// warpgroup 0 makes p = exp(k q) and adds p do to dv; warpgroup 1 makes
// dp = v do, takes p from warpgroup 0 and adds p (dp - delta) q to dk.
#pragma once

#include <cstddef>

#include "kernels/attention/attention_fast.h"
#include "kernels/attention/attention_wgmma.cuh"

namespace tapeline::cuda::attention_detail {

// Of the workspace.
struct Prepared {
  float2* rows;  // [H, padded] {lse in powers of 2, delta}
  int2* ranges;  // [padded]
  Seen* tiles;   // [padded / 64]
  int padded;
};
inline Prepared prepared(const AttentionBackwardPlan& plan, std::byte* at) {
  return {reinterpret_cast<float2*>(at + plan.rows),
          reinterpret_cast<int2*>(at + plan.ranges),
          reinterpret_cast<Seen*>(at + plan.tiles),
          static_cast<int>(plan.padded)};
}

// --- prepare -----------------------------------------------------------------

struct PrepareProblem {
  Ranges ranges;
  int heads;
  Rows<const bf16, 3> do_THV, o_THV;
  Rows<const float, 2> lse_TH;
  Prepared to;
};

constexpr int kPrepareWarps = 8;  // a head each

template <int kValueDim>
__global__ void __launch_bounds__(kPrepareWarps* kWarp)
    prepare(const __grid_constant__ PrepareProblem x) {
  using V = Pack<bf16>;
  constexpr int kLanes = kValueDim / V::kSize;  // of a row
  constexpr int kAtOnce = kWarp / kLanes;
  static_assert(kAtOnce * kLanes == kWarp);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int t0 = static_cast<int>(blockIdx.x) * 64;
  if (blockIdx.y == 0 && warp == 0) {
    Seen seen{INT_MAX, 0, 0, INT_MAX};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = t0 + i * kWarp + lane;
      const int2 row = x.ranges.row(t);
      x.to.ranges[t] = row;
      seen.add(Seen::of(row, t < x.ranges.tokens));
    }
    seen.join();
    if (lane == 0) x.to.tiles[blockIdx.x] = seen;
  }
  const int head = static_cast<int>(blockIdx.y) * kPrepareWarps + warp;
  if (head >= x.heads) return;
  float2* to = x.to.rows + static_cast<int64_t>(head) * x.to.padded;
#pragma unroll 4
  for (int i = 0; i < 64; i += kAtOnce) {
    const int t = t0 + i + lane / kLanes;
    const int2 row = x.ranges.row(t);
    const bool some = row.x < row.y;
    float sum = 0;
    if (some) {
      const V a =
          reinterpret_cast<const V*>(&x.do_THV(t, head, 0))[lane % kLanes];
      const V b =
          reinterpret_cast<const V*>(&x.o_THV(t, head, 0))[lane % kLanes];
#pragma unroll
      for (int e = 0; e < V::kSize; ++e) sum += load(a.at[e]) * load(b.at[e]);
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      sum += __shfl_xor_sync(~0u, sum, step);
    }
    if (lane % kLanes == 0) {
      to[t] = {some ? x.lse_TH(t, head) * kLog2e : INFINITY, sum};
    }
  }
}

// --- dq ----------------------------------------------------------------------

// When the products of a tile's ds with its keys run: alone, before the next
// tile's scores or after them. The later, the more of them is behind other
// work, and the more registers and stages of keys it takes.
enum class Products { kAlone, kBefore, kAfter };
template <int dim, int v_dim, int keys, int k_stages, int v_stages,
          Products products>
struct QueryConfig {
  static constexpr int kDim = dim;
  static constexpr int kValueDim = v_dim;
  static constexpr int kKeys = keys;
  static constexpr int kKeyStages = k_stages;
  static constexpr int kValueStages = v_stages;
  static constexpr Products kProducts = products;
  static constexpr int kRows = 128;
};

template <class C>
struct QueryShared {
  alignas(1024) char q[C::kRows * C::kDim * 2];  // then dq
  alignas(1024) char dout[C::kRows * C::kValueDim * 2];
  alignas(1024) char k[C::kKeyStages][C::kKeys * C::kDim * 2];
  alignas(1024) char v[C::kValueStages][C::kKeys * C::kValueDim * 2];
  Barrier q_full, k_full[C::kKeyStages], k_empty[C::kKeyStages];
  Barrier v_full[C::kValueStages], v_empty[C::kValueStages];
};

struct QueryProblem {
  Prepared from;
  Order order;
  int tokens, ratio;
  float scale;
};

template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    query_tiles(const __grid_constant__ CUtensorMap q_map,
                const __grid_constant__ CUtensorMap do_map,
                const __grid_constant__ CUtensorMap k_map,
                const __grid_constant__ CUtensorMap v_map,
                const __grid_constant__ CUtensorMap dq_map,
                const __grid_constant__ QueryProblem x) {
  extern __shared__ __align__(1024) char raw[];
  QueryShared<C>& s = *reinterpret_cast<QueryShared<C>*>(raw);
  enum : int { kGroup = 1 };  // named barriers
  constexpr int kPanels = C::kDim / 64, kValuePanels = C::kValueDim / 64;
  const int tid = static_cast<int>(threadIdx.x), group = tid / 128;
  const Order::Place place = x.order.at(static_cast<int>(blockIdx.x));
  const int tile0 = x.order.tiles - 1 - place.tile;
  const int t0 = tile0 * C::kRows, head = place.head;

  if (tid == 0) {
    s.q_full.init(1);
    for (int i = 0; i < C::kKeyStages; ++i) {
      s.k_full[i].init(1);
      s.k_empty[i].init(8);
    }
    for (int i = 0; i < C::kValueStages; ++i) {
      s.v_full[i].init(1);
      s.v_empty[i].init(8);
    }
    fence_barriers();
  }
  Seen seen = x.from.tiles[tile0 * 2];
  seen.add(x.from.tiles[tile0 * 2 + 1]);
  const int first = seen.begin / C::kKeys * C::kKeys;
  const int tiles =
      seen.begin < seen.end ? (seen.end - first + C::kKeys - 1) / C::kKeys : 0;
  __syncthreads();

  if (group == kLoader) {
    give_registers<kLoaderRegisters>();
    if (tid == kLoader * 128 && tiles > 0) {
      const int kv_head = head / x.ratio;
      s.q_full.arrive_expect(sizeof s.q + sizeof s.dout);
      load_rows<kPanels, C::kRows>(shared_address(s.q), q_map, s.q_full, head,
                                   t0);
      load_rows<kValuePanels, C::kRows>(shared_address(s.dout), do_map,
                                        s.q_full, head, t0);
      Ring<C::kKeyStages> k;
      Ring<C::kValueStages> v;
      for (int i = 0; i < tiles; ++i) {
        const int key = first + i * C::kKeys;
        s.k_empty[k.slot].wait(k.parity() ^ 1);
        s.k_full[k.slot].arrive_expect(sizeof s.k[0]);
        load_rows<kPanels, C::kKeys>(shared_address(s.k[k.slot]), k_map,
                                     s.k_full[k.slot], kv_head, key);
        s.v_empty[v.slot].wait(v.parity() ^ 1);
        s.v_full[v.slot].arrive_expect(sizeof s.v[0]);
        load_rows<kValuePanels, C::kKeys>(shared_address(s.v[v.slot]), v_map,
                                          s.v_full[v.slot], kv_head, key);
        k.next();
        v.next();
      }
    }
    return;
  }

  take_registers<kMathRegisters>();
  const int lane = tid % kWarp, c = lane % 4;
  const int row = tid % 128 / kWarp * 16 + lane / 4;  // and row + 8
  const int t = t0 + group * 64 + row;
  const int2 mine[2] = {x.from.ranges[t], x.from.ranges[t + 8]};
  const float2* stats =
      x.from.rows + static_cast<int64_t>(head) * x.from.padded;
  const float2 stat[2] = {stats[t], stats[t + 8]};
  const float scale2 = x.scale * kLog2e;
  const uint32_t my_q = shared_address(s.q) + group * 64 * kPanelRowBytes;
  const uint64_t q_desc = matrix_descriptor<kMajorK>(my_q);
  const uint64_t do_desc = matrix_descriptor<kMajorK>(
      shared_address(s.dout) + group * 64 * kPanelRowBytes);
  const uint64_t k_desc = matrix_descriptor<kMajorK>(shared_address(s.k));
  const uint64_t v_desc = matrix_descriptor<kMajorK>(shared_address(s.v));
  const uint64_t k_columns = matrix_descriptor<kMajorMN>(
      shared_address(s.k), C::kKeys * kPanelRowBytes);

  float dq[C::kDim / 2], score[C::kKeys / 2], dp[C::kKeys / 2];
  uint32_t ds[C::kKeys / 4];

  const auto dots = [&](auto& acc, auto panels, uint64_t a, uint64_t b)
      __attribute__((always_inline)) {
    // Else the sums below are kept in registers over the loop.
    asm volatile("" : "+l"(a));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < panels() * 4; ++i) {
      const int panel = i / 4, step = i % 4;
      wgmma<C::kKeys, kMajorK, kMajorK>(
          acc,
          a + (panel * C::kRows * kPanelRowBytes >> 4) +
              step * kDescriptorStep<kMajorK>,
          b + (panel * C::kKeys * kPanelRowBytes >> 4) +
              step * kDescriptorStep<kMajorK>,
          i == 0);
    }
    wgmma_commit();
  };
  Ring<C::kKeyStages> k;
  Ring<C::kValueStages> v;
  // Scores and dp of the tile at the rings.
  const auto next_dots = [&]() __attribute__((always_inline)) {
    s.k_full[k.slot].wait(k.parity());
    dots(score, std::integral_constant<int, kPanels>{}, q_desc,
         k_desc + k.slot * (sizeof s.k[0] >> 4));
    s.v_full[v.slot].wait(v.parity());
    dots(dp, std::integral_constant<int, kValuePanels>{}, do_desc,
         v_desc + v.slot * (sizeof s.v[0] >> 4));
  };
  const auto add_keys = [&](int slot, bool zero)
      __attribute__((always_inline)) {
    uint64_t b = k_columns + slot * (sizeof s.k[0] >> 4);
    asm volatile("" : "+l"(b));
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kKeys / 16; ++i) {
      wgmma<C::kDim, kMajorMN>(dq, ds[4 * i], ds[4 * i + 1], ds[4 * i + 2],
                               ds[4 * i + 3], b + i * kDescriptorStep<kMajorMN>,
                               zero && i == 0);
    }
    wgmma_commit();
  };
  // What runs when this is called: scores, dp and, unless kNone, the products
  // of the tile before (`last`).
  const auto gradients = [&]<bool kNone>(std::bool_constant<kNone>, int key,
                                         int last)
      __attribute__((always_inline)) {
    constexpr bool kBefore = !kNone && C::kProducts == Products::kBefore;
    constexpr bool kBehind = !kNone && C::kProducts == Products::kAfter;
    const bool masked = !seen.all_see(key, C::kKeys);
    wgmma_wait<kBehind ? 2 : 1>();
    wgmma_pin(score);
    if constexpr (kBefore) {
      wgmma_pin(dq);
      if (lane == 0) s.k_empty[last].arrive();
    }
#pragma unroll
    for (int j = 0; j < C::kKeys / 2; ++j) {
      score[j] = exp2_fast(fmaf(score[j], scale2, -stat[j % 4 / 2].x));
    }
    wgmma_wait<kBehind ? 1 : 0>();
    wgmma_pin(dp);
    if (lane == 0) s.v_empty[v.slot].arrive();
#pragma unroll
    for (int j = 0; j < C::kKeys / 2; ++j) {
      score[j] *= dp[j] - stat[j % 4 / 2].y;
    }
    if (masked) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int lo = mine[i].x - key - 2 * c, hi = mine[i].y - key - 2 * c;
#pragma unroll
        for (int j = 0; j < C::kKeys / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (8 * j + e < lo || 8 * j + e >= hi) {
              score[4 * j + 2 * i + e] = 0;
            }
          }
        }
      }
    }
    if constexpr (kBehind) {
      wgmma_wait<0>();
      wgmma_pin(dq);
      if (lane == 0) s.k_empty[last].arrive();
    }
    pack_rows(score, ds);
    if (key < seen.begin || key + C::kKeys > seen.end) {
      zero_rows(shared_address(s.k[k.slot]), kPanels, C::kKeys,
                seen.begin - key, seen.end - key, kGroup + group);
    }
  };

  if (tiles > 0) {
    s.q_full.wait(0);
    next_dots();
    gradients(std::true_type{}, first, 0);
#pragma unroll 1
    for (int i = 1; i < tiles; ++i) {
      const int last = k.slot;
      k.next();
      v.next();
      wgmma_pin(dq);
      if (C::kProducts != Products::kAfter) add_keys(last, i == 1);
      if constexpr (C::kProducts == Products::kAlone) {
        wgmma_wait<0>();
        wgmma_pin(dq);
        if (lane == 0) s.k_empty[last].arrive();
      }
      next_dots();
      if (C::kProducts == Products::kAfter) add_keys(last, i == 1);
      gradients(std::bool_constant<C::kProducts == Products::kAlone>{},
                first + i * C::kKeys, last);
    }
    wgmma_pin(dq);
    add_keys(k.slot, tiles == 1);
    wgmma_wait<0>();
    wgmma_pin(dq);
  } else {
#pragma unroll
    for (float& v : dq) v = 0;
  }

#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    store_panel(my_q + panel * C::kRows * kPanelRowBytes, dq, panel, x.scale,
                x.scale);
  }
  fence_async();
  named_barrier_sync(kGroup + group, 128);
  // Rows behind the last query are not written.
  if (tid % 128 == 0 && t0 + group * 64 < x.tokens) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      tma_store(dq_map, my_q + panel * C::kRows * kPanelRowBytes, panel * 64,
                head, t0 + group * 64);
    }
    commit_stores();
    wait_stores_read<0>();
  }
}

// --- dk, dv ------------------------------------------------------------------

// kBlocks times 64 keys and kQueries (64 or 128) queries at a time. kOverlap:
// the next scores are made before p (or ds) of these is multiplied, which needs
// three stages.
template <int dim, int v_dim, int blocks, int queries, int stages, bool overlap>
struct KeyConfig {
  static constexpr int kDim = dim;
  static constexpr int kValueDim = v_dim;
  static constexpr int kBlocks = blocks;
  static constexpr int kKeys = 64 * blocks;
  static constexpr int kQueries = queries;
  static constexpr int kStages = stages;
  static constexpr bool kOverlap = overlap;
};

template <class C>
struct KeyShared {
  alignas(1024) char k[C::kKeys * C::kDim * 2];       // then dk
  alignas(1024) char v[C::kKeys * C::kValueDim * 2];  // then dv
  alignas(1024) char q[C::kStages][C::kQueries * C::kDim * 2];
  alignas(1024) char dout[C::kStages][C::kQueries * C::kValueDim * 2];
  alignas(128) float2 rows[C::kStages][C::kQueries];
  alignas(128) int2 ranges[C::kStages][C::kQueries];
  // Thread i of warpgroup 0 and of warpgroup 1 hold the same places of a tile.
  uint4 p[2][C::kQueries / 16][128];
  int kind[C::kStages];
  Barrier kv_full, full[C::kStages], empty[C::kStages];
};
// Kinds of tiles of queries: bits.
enum : int { kMasked = 1, kEmptyRows = 2, kEnd = 4 };

struct KeyProblem {
  Prepared from;
  Order order;  // heads: of keys
  int keys, ratio;
  float scale;
};

enum : int { kKeyGroup = 1, kHaveP = 3, kTookP = 5, kAllDone = 7 };

template <class C>
__device__ __forceinline__ void load_queries(KeyShared<C>& s,
                                             const CUtensorMap& q_map,
                                             const CUtensorMap& do_map,
                                             const KeyProblem& x, int key0,
                                             int kv_head) {
  constexpr int kEach = C::kQueries / 64;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int tiles = x.from.padded / C::kQueries;
  Ring<C::kStages> ring;
  for (int head = kv_head * x.ratio; head < (kv_head + 1) * x.ratio; ++head) {
    for (int base = 0; base < tiles; base += kWarp) {
      Seen seen{INT_MAX, 0, 0, INT_MAX};
      if (base + lane < tiles) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          seen.add(x.from.tiles[(base + lane) * kEach + i]);
        }
      }
      const bool some = seen.begin < seen.end && seen.begin < key0 + C::kKeys &&
                        seen.end > key0;
      const int mine = (seen.all_see(key0, C::kKeys) ? 0 : kMasked) |
                       (seen.all_end == 0 ? kEmptyRows : 0);
      for (unsigned left = __ballot_sync(~0u, some); left != 0;
           left &= left - 1) {
        const int which = __ffs(static_cast<int>(left)) - 1;
        const int kind = __shfl_sync(~0u, mine, which);
        const int t = (base + which) * C::kQueries, slot = ring.slot;
        if (lane == 0) {
          s.empty[slot].wait(ring.parity() ^ 1);
          s.kind[slot] = kind;
          s.full[slot].arrive_expect(sizeof s.q[0] + sizeof s.dout[0] +
                                     sizeof s.rows[0] + sizeof s.ranges[0]);
          load_rows<C::kDim / 64, C::kQueries>(shared_address(s.q[slot]), q_map,
                                               s.full[slot], head, t);
          load_rows<C::kValueDim / 64, C::kQueries>(
              shared_address(s.dout[slot]), do_map, s.full[slot], head, t);
          bulk_load(
              shared_address(s.rows[slot]),
              x.from.rows + static_cast<int64_t>(head) * x.from.padded + t,
              sizeof s.rows[0], s.full[slot]);
          bulk_load(shared_address(s.ranges[slot]), x.from.ranges + t,
                    sizeof s.ranges[0], s.full[slot]);
        }
        __syncwarp();
        ring.next();
      }
    }
  }
  if (lane == 0) {
    s.empty[ring.slot].wait(ring.parity() ^ 1);
    s.kind[ring.slot] = kEnd;
    s.full[ring.slot].arrive();
  }
}

template <class C, int kGroup>
__device__ __forceinline__ void math_of_keys(KeyShared<C>& s,
                                             const CUtensorMap& out_map,
                                             const KeyProblem& x, int key0,
                                             int kv_head) {
  // Warpgroup 0: scores of k and q, then p with do. 1: dp of v and do, then ds
  // with q.
  constexpr int kInner = kGroup == 0 ? C::kDim : C::kValueDim;
  constexpr int kOut = kGroup == 0 ? C::kValueDim : C::kDim;
  constexpr int kRowPanel = C::kKeys * kPanelRowBytes;
  constexpr int kQueryPanel = C::kQueries * kPanelRowBytes;
  constexpr int kInnerBytes = C::kQueries * kInner * 2;
  constexpr int kOuterBytes = C::kQueries * kOut * 2;
  const int tid = static_cast<int>(threadIdx.x) % 128;
  const int lane = tid % kWarp, c = lane % 4;
  const int row = tid / kWarp * 16 + lane / 4;  // and row + 8
  const float scale2 = x.scale * kLog2e;
  const uint32_t my_rows = shared_address(kGroup == 0 ? s.k : s.v);
  const uint64_t row_desc = matrix_descriptor<kMajorK>(my_rows);
  const uint64_t inner_desc = matrix_descriptor<kMajorK>(
      kGroup == 0 ? shared_address(s.q) : shared_address(s.dout));
  const uint64_t outer_desc = matrix_descriptor<kMajorMN>(
      kGroup == 0 ? shared_address(s.dout) : shared_address(s.q), kQueryPanel);

  float sum[C::kBlocks][kOut / 2], acc[C::kQueries / 2];
  uint32_t factor[C::kQueries / 4];  // p or ds
#pragma unroll
  for (int b = 0; b < C::kBlocks; ++b) {
#pragma unroll
    for (float& v : sum[b]) v = 0;
  }

  const auto dots = [&](int slot, int block) __attribute__((always_inline)) {
    const uint64_t a = row_desc + (block * 64 * kPanelRowBytes >> 4);
    const uint64_t b = inner_desc + slot * (kInnerBytes >> 4);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kInner / 16; ++i) {
      const int panel = i / 4, step = i % 4;
      wgmma<C::kQueries, kMajorK, kMajorK>(
          acc, a + (panel * kRowPanel >> 4) + step * kDescriptorStep<kMajorK>,
          b + (panel * kQueryPanel >> 4) + step * kDescriptorStep<kMajorK>,
          i == 0);
    }
    wgmma_commit();
  };
  const auto add = [&](float(&to)[kOut / 2], int slot)
      __attribute__((always_inline)) {
    const uint64_t b = outer_desc + slot * (kOuterBytes >> 4);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kQueries / 16; ++i) {
      wgmma<kOut, kMajorMN>(to, factor[4 * i], factor[4 * i + 1],
                            factor[4 * i + 2], factor[4 * i + 3],
                            b + i * kDescriptorStep<kMajorMN>);
    }
    wgmma_commit();
  };

  Ring<C::kStages> ring;
  int item = 0;  // blocks of 64 keys so far
  // The kind of the tile at the ring, once it is there.
  const auto next_tile = [&]() __attribute__((always_inline)) {
    s.full[ring.slot].wait(ring.parity());
    const int kind = s.kind[ring.slot];
    if (kind & kEmptyRows) {
      const uint32_t q = shared_address(s.q[ring.slot]);
      const uint32_t dout = shared_address(s.dout[ring.slot]);
      for (int i = tid; i < C::kQueries * 8; i += 128) {
        const int2 range = s.ranges[ring.slot][i / 8];
        if (range.x < range.y) continue;
        for (int p = 0; p < C::kDim / 64; ++p) {
          store_shared(q + p * kQueryPanel + i * 16, uint4{0, 0, 0, 0});
        }
        for (int p = 0; p < C::kValueDim / 64; ++p) {
          store_shared(dout + p * kQueryPanel + i * 16, uint4{0, 0, 0, 0});
        }
      }
      fence_async();
      named_barrier_sync(kKeyGroup + kGroup, 128);
    }
    return kind;
  };
  // acc becomes p or ds of block b. Waits until `factor` is free for it.
  const auto gradients = [&](int slot, int kind, int block)
      __attribute__((always_inline)) {
    const int half = item & 1;
    uint32_t with[C::kQueries / 4];
    if constexpr (kGroup == 1) {
      named_barrier_sync(kHaveP + half, 256);
#pragma unroll
      for (int i = 0; i < C::kQueries / 16; ++i) {
        const uint4 v = s.p[half][i][tid];
        with[4 * i] = v.x;
        with[4 * i + 1] = v.y;
        with[4 * i + 2] = v.z;
        with[4 * i + 3] = v.w;
      }
      named_barrier_arrive(kTookP + half, 256);
    }
#pragma unroll
    for (int j = 0; j < C::kQueries / 8; ++j) {
      // {lse, delta} of columns 8 j + 2 c and the next.
      const float4 stat =
          *reinterpret_cast<const float4*>(&s.rows[slot][8 * j + 2 * c]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& v = acc[4 * j + i];
        if constexpr (kGroup == 0) {
          v = exp2_fast(fmaf(v, scale2, -(i % 2 == 0 ? stat.x : stat.z)));
        } else {
          const uint32_t pair = with[2 * j + i / 2];
          const float p =
              __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000);
          v = p * (v - (i % 2 == 0 ? stat.y : stat.w));
        }
      }
    }
    if (kind & kMasked) {
      const int key = key0 + block * 64 + row;
#pragma unroll
      for (int j = 0; j < C::kQueries / 8; ++j) {
        const int4 r =
            *reinterpret_cast<const int4*>(&s.ranges[slot][8 * j + 2 * c]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int lo = i % 2 == 0 ? r.x : r.z, hi = i % 2 == 0 ? r.y : r.w;
          const int at = key + i / 2 * 8;
          if (at < lo || at >= hi) acc[4 * j + i] = 0;
        }
      }
    }
    if constexpr (C::kOverlap) {
      wgmma_wait<0>();
#pragma unroll
      for (int b = 0; b < C::kBlocks; ++b) wgmma_pin(sum[b]);
    }
    pack_rows(acc, factor);
    if constexpr (kGroup == 0) {
      if (item >= 2) named_barrier_sync(kTookP + half, 256);
#pragma unroll
      for (int i = 0; i < C::kQueries / 16; ++i) {
        s.p[half][i][tid] = uint4{factor[4 * i], factor[4 * i + 1],
                                  factor[4 * i + 2], factor[4 * i + 3]};
      }
      named_barrier_arrive(kHaveP + half, 256);
    }
    ++item;
  };

  // The same once acc is there.
  const auto make = [&](int slot, int kind, int block)
      __attribute__((always_inline)) {
    wgmma_pin(acc);
    gradients(slot, kind, block);
  };
  s.kv_full.wait(0);
  int kind = next_tile();
  if constexpr (C::kOverlap) {
    if (!(kind & kEnd)) {
      int slot = ring.slot;
      dots(slot, 0);
      wgmma_wait<0>();
      make(slot, kind, 0);
#pragma unroll 1
      for (;;) {
#pragma unroll
        for (int b = 0; b + 1 < C::kBlocks; ++b) {
          wgmma_pin(sum[b]);
          dots(slot, b + 1);
          add(sum[b], slot);
          wgmma_wait<1>();
          make(slot, kind, b + 1);
        }
        ring.next();
        kind = next_tile();
        if (kind & kEnd) break;
        wgmma_pin(sum[C::kBlocks - 1]);
        dots(ring.slot, 0);
        add(sum[C::kBlocks - 1], slot);
        wgmma_wait<1>();
        make(ring.slot, kind, 0);
        if (lane == 0) s.empty[slot].arrive();
        slot = ring.slot;
      }
      wgmma_pin(sum[C::kBlocks - 1]);
      add(sum[C::kBlocks - 1], slot);
      wgmma_wait<0>();
      wgmma_pin(sum[C::kBlocks - 1]);
    }
  } else {
#pragma unroll 1
    while (!(kind & kEnd)) {
      const int slot = ring.slot;
#pragma unroll
      for (int b = 0; b < C::kBlocks; ++b) {
        dots(slot, b);
        wgmma_wait<0>();
        make(slot, kind, b);
        wgmma_pin(sum[b]);
        add(sum[b], slot);
        wgmma_wait<0>();
        wgmma_pin(sum[b]);
      }
      if (lane == 0) s.empty[slot].arrive();
      ring.next();
      kind = next_tile();
    }
  }
  if constexpr (kGroup == 0) {
    // Every arrival is waited for.
    if (item >= 1) named_barrier_sync(kTookP + ((item - 1) & 1), 256);
    if (item >= 2) named_barrier_sync(kTookP + (item & 1), 256);
  }
  // Nobody reads k and v any more.
  named_barrier_sync(kAllDone, 256);
  const uint32_t to = shared_address(kGroup == 0 ? s.v : s.k);
  const float scale = kGroup == 0 ? 1 : x.scale;
#pragma unroll
  for (int b = 0; b < C::kBlocks; ++b) {
#pragma unroll
    for (int panel = 0; panel < kOut / 64; ++panel) {
      store_panel(to + panel * kRowPanel + b * 64 * kPanelRowBytes, sum[b],
                  panel, scale, scale);
    }
  }
  fence_async();
  named_barrier_sync(kKeyGroup + kGroup, 128);
  if (tid == 0) {
#pragma unroll
    for (int b = 0; b < C::kBlocks; ++b) {
      if (key0 + b * 64 >= x.keys) break;
#pragma unroll
      for (int panel = 0; panel < kOut / 64; ++panel) {
        tma_store(out_map, to + panel * kRowPanel + b * 64 * kPanelRowBytes,
                  panel * 64, kv_head, key0 + b * 64);
      }
    }
    commit_stores();
    wait_stores_read<0>();
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    key_tiles(const __grid_constant__ CUtensorMap q_map,
              const __grid_constant__ CUtensorMap do_map,
              const __grid_constant__ CUtensorMap k_map,
              const __grid_constant__ CUtensorMap v_map,
              const __grid_constant__ CUtensorMap dk_map,
              const __grid_constant__ CUtensorMap dv_map,
              const __grid_constant__ KeyProblem x) {
  extern __shared__ __align__(1024) char raw[];
  KeyShared<C>& s = *reinterpret_cast<KeyShared<C>*>(raw);
  const int tid = static_cast<int>(threadIdx.x), group = tid / 128;
  // Of a causal sequence the first keys are seen most: they go first.
  const Order::Place place = x.order.at(static_cast<int>(blockIdx.x));
  const int key0 = place.tile * C::kKeys, kv_head = place.head;

  if (tid == 0) {
    s.kv_full.init(1);
    for (int i = 0; i < C::kStages; ++i) {
      s.full[i].init(1);
      s.empty[i].init(8);
    }
    fence_barriers();
  }
  __syncthreads();

  if (group == kLoader) {
    give_registers<kLoaderRegisters>();
    if (tid / kWarp == kLoader * 4) {
      if (tid % kWarp == 0) {
        s.kv_full.arrive_expect(sizeof s.k + sizeof s.v);
        load_rows<C::kDim / 64, C::kKeys>(shared_address(s.k), k_map, s.kv_full,
                                          kv_head, key0);
        load_rows<C::kValueDim / 64, C::kKeys>(shared_address(s.v), v_map,
                                               s.kv_full, kv_head, key0);
      }
      __syncwarp();
      load_queries<C>(s, q_map, do_map, x, key0, kv_head);
    }
    return;
  }
  take_registers<kMathRegisters>();
  if (group == 0) {
    math_of_keys<C, 0>(s, dv_map, x, key0, kv_head);
  } else {
    math_of_keys<C, 1>(s, dk_map, x, key0, kv_head);
  }
}

// --- host --------------------------------------------------------------------

struct BackwardArguments {
  View<const bf16> do_THV, q_THD, k_SGD, v_SGV, o_THV;
  View<const float> lse_TH;
  KeyRange range;
  float scale;
  View<bf16> dq_THD, dk_SGD, dv_SGV;
  Prepared prepared;

  int64_t tokens() const { return q_THD.size(0); }
  int64_t keys() const { return k_SGD.size(0); }
  int64_t heads() const { return q_THD.size(1); }
  int64_t groups() const { return k_SGD.size(1); }
  int ratio() const { return static_cast<int>(heads() / groups()); }
};

template <int kValueDim>
void launch_prepare(const Launch& l, const BackwardArguments& x) {
  const PrepareProblem problem{ranges_of(x.range, x.tokens()),
                               static_cast<int>(x.heads()),
                               rows<3>(x.do_THV),
                               rows<3>(x.o_THV),
                               rows<2>(x.lse_TH),
                               x.prepared};
  const dim3 grid(static_cast<unsigned>(x.prepared.padded / 64),
                  static_cast<unsigned>(ceil_div(x.heads(), kPrepareWarps)));
  prepare<kValueDim><<<grid, kPrepareWarps * kWarp, 0, stream_of(l)>>>(problem);
  check_launch("attention_backward");
}

template <class C>
void launch_queries(const Launch& l, const BackwardArguments& x) {
  constexpr int kBytes = sizeof(QueryShared<C>);
  static_assert(kBytes <= 227 << 10);
  const int64_t tiles = ceil_div(x.tokens(), C::kRows);
  const QueryProblem problem{x.prepared,
                             order_of(tiles, x.heads(), x.ratio(),
                                      x.keys() * (C::kDim + C::kValueDim) * 2),
                             static_cast<int>(x.tokens()), x.ratio(), x.scale};
  allow_shared(query_tiles<C>, kBytes);
  query_tiles<C><<<static_cast<unsigned>(tiles * x.heads()), kThreads, kBytes,
                   stream_of(l)>>>(
      head_map(x.q_THD, C::kRows), head_map(x.do_THV, C::kRows),
      head_map(x.k_SGD, C::kKeys), head_map(x.v_SGV, C::kKeys),
      head_map(x.dq_THD, 64), problem);
  check_launch("attention_backward");
}

template <class C>
void launch_keys(const Launch& l, const BackwardArguments& x) {
  constexpr int kBytes = sizeof(KeyShared<C>);
  static_assert(kBytes <= 227 << 10);
  const int64_t tiles = ceil_div(x.keys(), C::kKeys);
  const KeyProblem problem{
      x.prepared,
      order_of(tiles, x.groups(), 1, x.tokens() * (C::kDim + C::kValueDim) * 2),
      static_cast<int>(x.keys()), x.ratio(), x.scale};
  allow_shared(key_tiles<C>, kBytes);
  key_tiles<C><<<static_cast<unsigned>(tiles * x.groups()), kThreads, kBytes,
                 stream_of(l)>>>(
      head_map(x.q_THD, C::kQueries), head_map(x.do_THV, C::kQueries),
      head_map(x.k_SGD, C::kKeys), head_map(x.v_SGV, C::kKeys),
      head_map(x.dk_SGD, 64), head_map(x.dv_SGV, 64), problem);
  check_launch("attention_backward");
}

}  // namespace tapeline::cuda::attention_detail
