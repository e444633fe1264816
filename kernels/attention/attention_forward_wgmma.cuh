// The forward kernel: private to attention_forward_wgmma.cu and to what times
// it.
//
// A block has 128 queries of one head, 64 for each of two math warpgroups, and
// walks the key tiles that any of them sees. Tiles start on multiples of kKeys,
// and one that a row does not see adds exact zeros to it, so the bits of a row
// do not depend on its neighbours. In a warpgroup the products of tile i - 1
// with values run while tile i goes through the softmax; the two warpgroups
// may also take turns in issuing products (kTurns), so that one multiplies
// while the other exponentiates (Shah et al. 2024, sections 3.1 and 3.2).
#pragma once

#include "kernels/attention/attention_wgmma.cuh"

namespace tapeline::cuda::attention_detail {

template <int dim, int v_dim, int keys, int stages, bool turns>
struct ForwardConfig {
  static constexpr int kDim = dim;
  static constexpr int kValueDim = v_dim;
  static constexpr int kKeys = keys;
  static constexpr int kStages = stages;
  static constexpr bool kTurns = turns;
  static constexpr int kRows = 128;
};

template <class C>
struct ForwardShared {
  alignas(1024) char q[C::kRows * C::kDim * 2];  // then o
  alignas(1024) char k[C::kStages][C::kKeys * C::kDim * 2];
  alignas(1024) char v[C::kStages][C::kKeys * C::kValueDim * 2];
  Seen seen[4];
  Barrier q_full, k_full[C::kStages], k_empty[C::kStages];
  Barrier v_full[C::kStages], v_empty[C::kStages];
};

struct ForwardProblem {
  Ranges ranges;
  Order order;
  int ratio;  // heads that share keys
  float scale;
  Rows<float, 2> lse_TH;
};

template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    forward_tiles(const __grid_constant__ CUtensorMap q_map,
                  const __grid_constant__ CUtensorMap k_map,
                  const __grid_constant__ CUtensorMap v_map,
                  const __grid_constant__ CUtensorMap o_map,
                  const __grid_constant__ ForwardProblem x) {
  extern __shared__ __align__(1024) char raw[];
  ForwardShared<C>& s = *reinterpret_cast<ForwardShared<C>*>(raw);
  enum : int { kGroup = 1, kTurn = 3 };  // named barriers
  constexpr int kPanels = C::kDim / 64, kValuePanels = C::kValueDim / 64;
  static_assert(kValuePanels <= kPanels);  // o takes the place of q
  const int tid = static_cast<int>(threadIdx.x), group = tid / 128;
  const Order::Place place = x.order.at(static_cast<int>(blockIdx.x));
  // Of a causal sequence the last tiles have most keys: they go first.
  const int t0 = (x.order.tiles - 1 - place.tile) * C::kRows;
  const int head = place.head;

  if (tid == 0) {
    s.q_full.init(1);
    for (int i = 0; i < C::kStages; ++i) {
      s.k_full[i].init(1);
      s.v_full[i].init(1);
      s.k_empty[i].init(8);
      s.v_empty[i].init(8);
    }
    fence_barriers();
  }
  if (tid < 128) {
    Seen seen = Seen::of(x.ranges.row(t0 + tid), t0 + tid < x.ranges.tokens);
    seen.join();
    if (tid % kWarp == 0) s.seen[tid / kWarp] = seen;
  }
  __syncthreads();
  Seen seen = s.seen[0];
#pragma unroll
  for (int i = 1; i < 4; ++i) seen.add(s.seen[i]);
  const int first = seen.begin / C::kKeys * C::kKeys;
  const int tiles =
      seen.begin < seen.end ? (seen.end - first + C::kKeys - 1) / C::kKeys : 0;

  if (group == kLoader) {
    give_registers<kLoaderRegisters>();
    if (tid == kLoader * 128 && tiles > 0) {
      const int kv_head = head / x.ratio;
      s.q_full.arrive_expect(sizeof s.q);
      load_rows<kPanels, C::kRows>(shared_address(s.q), q_map, s.q_full, head,
                                   t0);
      Ring<C::kStages> ring;
      for (int i = 0; i < tiles; ++i) {
        const int key = first + i * C::kKeys, slot = ring.slot;
        s.k_empty[slot].wait(ring.parity() ^ 1);
        s.k_full[slot].arrive_expect(sizeof s.k[0]);
        load_rows<kPanels, C::kKeys>(shared_address(s.k[slot]), k_map,
                                     s.k_full[slot], kv_head, key);
        s.v_empty[slot].wait(ring.parity() ^ 1);
        s.v_full[slot].arrive_expect(sizeof s.v[0]);
        load_rows<kValuePanels, C::kKeys>(shared_address(s.v[slot]), v_map,
                                          s.v_full[slot], kv_head, key);
        ring.next();
      }
    }
    return;
  }

  take_registers<kMathRegisters>();
  const int lane = tid % kWarp, c = lane % 4;
  const int row = tid % 128 / kWarp * 16 + lane / 4;  // and row + 8
  const int t = t0 + group * 64 + row;
  const int2 mine[2] = {x.ranges.row(t), x.ranges.row(t + 8)};
  const float scale2 = x.scale * kLog2e;  // for powers of 2
  const uint32_t my_q = shared_address(s.q) + group * 64 * kPanelRowBytes;
  const uint64_t q_desc = matrix_descriptor<kMajorK>(my_q);
  const uint64_t k_desc = matrix_descriptor<kMajorK>(shared_address(s.k));
  const uint64_t v_desc = matrix_descriptor<kMajorMN>(
      shared_address(s.v), C::kKeys * kPanelRowBytes);

  float o[C::kValueDim / 2], score[C::kKeys / 2];
  uint32_t p[C::kKeys / 4];
#pragma unroll
  for (float& v : o) v = 0;
  float high[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, shrink[2];

  const auto dots = [&](int slot) __attribute__((always_inline)) {
    const uint64_t k = k_desc + slot * (sizeof s.k[0] >> 4);
#pragma unroll
    for (int i = 0; i < kPanels * 4; ++i) {
      const int panel = i / 4, step = i % 4;
      wgmma<C::kKeys, kMajorK, kMajorK>(
          score,
          q_desc + (panel * C::kRows * kPanelRowBytes >> 4) +
              step * kDescriptorStep<kMajorK>,
          k + (panel * C::kKeys * kPanelRowBytes >> 4) +
              step * kDescriptorStep<kMajorK>,
          i == 0);
    }
    wgmma_commit();
  };
  const auto add_values = [&](int slot) __attribute__((always_inline)) {
    const uint64_t v = v_desc + slot * (sizeof s.v[0] >> 4);
#pragma unroll
    for (int i = 0; i < C::kKeys / 16; ++i) {
      wgmma<C::kValueDim, kMajorMN>(o, p[4 * i], p[4 * i + 1], p[4 * i + 2],
                                    p[4 * i + 3],
                                    v + i * kDescriptorStep<kMajorMN>);
    }
    wgmma_commit();
  };
  // Scores of the tile at `key` become exp(score - largest so far).
  const auto softmax = [&](int key) __attribute__((always_inline)) {
    if (!seen.all_see(key, C::kKeys)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int lo = mine[i].x - key - 2 * c, hi = mine[i].y - key - 2 * c;
#pragma unroll
        for (int j = 0; j < C::kKeys / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (8 * j + e < lo || 8 * j + e >= hi) {
              score[4 * j + 2 * i + e] = -INFINITY;
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float now = fmaxf(score[2 * i], score[2 * i + 1]);
#pragma unroll
      for (int j = 1; j < C::kKeys / 8; ++j) {
        now = fmaxf(now, fmaxf(score[4 * j + 2 * i], score[4 * j + 2 * i + 1]));
      }
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
      now = fmaxf(now, high[i]);
      // Where every score is -inf, 0 stands for their maximum.
      const float shift = now == -INFINITY ? 0 : now * scale2;
      shrink[i] = exp2_fast(high[i] * scale2 - shift);
      high[i] = now;
      float part[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < C::kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& v = score[4 * j + 2 * i + e];
          v = exp2_fast(fmaf(v, scale2, -shift));
          part[e] += v;
        }
      }
      sum[i] = fmaf(sum[i], shrink[i], part[0] + part[1]);
    }
  };
  // Value rows of the tile at `key` that no query of this block sees.
  const auto drop_values = [&](int key, int slot)
      __attribute__((always_inline)) {
    if (key < seen.begin || key + C::kKeys > seen.end) {
      zero_rows(shared_address(s.v[slot]), kValuePanels, C::kKeys,
                seen.begin - key, seen.end - key, kGroup + group);
    }
  };

  if (tiles > 0) {
    if (C::kTurns && group == 1 && tiles > 1) {
      named_barrier_arrive(kTurn, 256);
    }
    Ring<C::kStages> ring;
    s.q_full.wait(0);
    s.k_full[0].wait(0);
    wgmma_fence();
    dots(0);
    wgmma_wait<0>();
    wgmma_pin(score);
    if (lane == 0) s.k_empty[0].arrive();
    softmax(first);
    pack_rows(score, p);
    int last = 0;
    uint32_t last_parity = 0;
    ring.next();
#pragma unroll 1
    for (int i = 1; i < tiles; ++i) {
      const int key = first + i * C::kKeys, slot = ring.slot;
      s.v_full[last].wait(last_parity);
      drop_values(key - C::kKeys, last);
      s.k_full[slot].wait(ring.parity());
      if constexpr (C::kTurns) named_barrier_sync(kTurn + group, 256);
      wgmma_pin(o);
      wgmma_fence();
      dots(slot);
      add_values(last);
      if (C::kTurns && (group == 0 || i + 1 < tiles)) {
        named_barrier_arrive(kTurn + (group ^ 1), 256);
      }
      wgmma_wait<1>();
      wgmma_pin(score);
      if (lane == 0) s.k_empty[slot].arrive();
      softmax(key);
      wgmma_wait<0>();
      wgmma_pin(o);
      if (lane == 0) s.v_empty[last].arrive();
      if (__any_sync(~0u, shrink[0] != 1 || shrink[1] != 1)) {
#pragma unroll
        for (int j = 0; j < C::kValueDim / 8; ++j) {
          o[4 * j] *= shrink[0];
          o[4 * j + 1] *= shrink[0];
          o[4 * j + 2] *= shrink[1];
          o[4 * j + 3] *= shrink[1];
        }
      }
      pack_rows(score, p);
      last = slot;
      last_parity = ring.parity();
      ring.next();
    }
    s.v_full[last].wait(last_parity);
    drop_values(first + (tiles - 1) * C::kKeys, last);
    wgmma_pin(o);
    wgmma_fence();
    add_values(last);
    wgmma_wait<0>();
    wgmma_pin(o);
  }

  float inverse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
    sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    const bool empty = sum[i] == 0;
    inverse[i] = empty ? 0 : 1 / sum[i];
    if (c == 0 && t + 8 * i < x.ranges.tokens) {
      x.lse_TH(t + 8 * i, head) =
          empty ? INFINITY : high[i] * x.scale + logf(sum[i]);
    }
  }
#pragma unroll
  for (int panel = 0; panel < kValuePanels; ++panel) {
    store_panel(my_q + panel * C::kRows * kPanelRowBytes, o, panel, inverse[0],
                inverse[1]);
  }
  fence_async();
  named_barrier_sync(kGroup + group, 128);
  // Rows behind the last query are not written.
  if (tid % 128 == 0 && t0 + group * 64 < x.ranges.tokens) {
#pragma unroll
    for (int panel = 0; panel < kValuePanels; ++panel) {
      tma_store(o_map, my_q + panel * C::kRows * kPanelRowBytes, panel * 64,
                head, t0 + group * 64);
    }
    commit_stores();
    wait_stores_read<0>();
  }
}

template <class C>
void launch_forward(const Launch& l, const View<const bf16>& q_THD,
                    const View<const bf16>& k_SGD,
                    const View<const bf16>& v_SGV, const KeyRange& range,
                    double scale, const View<bf16>& o_THV,
                    const View<float>& lse_TH) {
  constexpr int kBytes = sizeof(ForwardShared<C>);
  static_assert(kBytes <= 227 << 10);
  const int64_t tokens = q_THD.size(0), heads = q_THD.size(1);
  const int64_t ratio = heads / k_SGD.size(1);
  const int64_t tiles = ceil_div(tokens, C::kRows);
  const ForwardProblem problem{
      ranges_of(range, tokens),
      order_of(tiles, heads, ratio,
               k_SGD.size(0) * (C::kDim + C::kValueDim) * 2),
      static_cast<int>(ratio), static_cast<float>(scale), rows<2>(lse_TH)};
  allow_shared(forward_tiles<C>, kBytes);
  forward_tiles<C><<<static_cast<unsigned>(tiles * heads), kThreads, kBytes,
                     stream_of(l)>>>(
      head_map(q_THD, C::kRows), head_map(k_SGD, C::kKeys),
      head_map(v_SGV, C::kKeys), head_map(o_THV, 64), problem);
  check_launch("attention_forward");
}

}  // namespace tapeline::cuda::attention_detail
