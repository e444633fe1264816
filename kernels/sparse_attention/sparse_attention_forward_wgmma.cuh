// The forward kernel: private to sparse_attention_forward_wgmma.cu and to what
// times it.
//
// A block has one query's 64 heads and takes its keys 128 at a time, two tiles
// in two buffers. Math group g scores tile g; the two exchange row maxima and
// probabilities, and group g adds both tiles' values to columns 256 g .. of o.
// Parts of the buffers are handed back to the loaders as soon as a group has
// used them, so the next tiles arrive while the other half of the products run:
//
//   part  panels          used last by        holds also
//   A     tile 0, 0-3     group 0, first
//   B     tile 1, 4-7     group 1, first
//   C     tile 1, 0-3, 8  group 0, second     p of tile 1, in panel 8 (rope)
//   D     tile 0, 4-8     group 1, second     p of tile 0, in panel 8
#pragma once

#include "kernels/sparse_attention/sparse_attention_wgmma.cuh"

namespace tapeline::cuda::sparse_detail {

struct ForwardShared {
  alignas(1024) char q[kPanels][kPanelBytes];
  alignas(1024) char kv[2][kPanels][kPanelBytes];
  int32_t id[kMlaMaxIds];
  float row_max[2][64], row_sum[2][64];
  Barrier q_full, full[4], empty[4];  // of parts A to D
};

struct ForwardProblem {
  const bf16* kv;
  int64_t kv_stride;
  int keys, heads, head_blocks, slots;
  Rows<const int32_t, 2> ids_TK;
  float scale;
  Rows<bf16, 3> o_THV;
  Rows<float, 2> lse_TH;
};

__global__ void __launch_bounds__(384, 1)
    forward_tiles(const __grid_constant__ CUtensorMap q_map, ForwardProblem x) {
  extern __shared__ __align__(1024) char raw[];
  ForwardShared& s = *reinterpret_cast<ForwardShared*>(raw);
  enum : int { kA, kB, kC, kD };
  enum : int { kMaxima = 1, kProbabilities, kGroup };  // named barriers
  const int tid = static_cast<int>(threadIdx.x);
  const int group = tid / 128;
  const int t = static_cast<int>(blockIdx.x) / x.head_blocks;
  const int head0 = static_cast<int>(blockIdx.x) % x.head_blocks * kMlaHeads;

  if (tid == 0) {
    s.q_full.init(1);
    for (int i = 0; i < 4; ++i) {
      s.full[i].init(128);
      s.empty[i].init(4);
    }
    fence_barriers();
  }
  const int count =
      compact_ids<384>(x.ids_TK.row(t), x.slots, x.keys, s.id, nullptr,
                       reinterpret_cast<int*>(s.row_max));
  const int pairs = (count + 2 * kTileKeys - 1) / (2 * kTileKeys);

  if (group == 2) {
    give_registers<72>();
    if (pairs == 0) return;
    if (tid == 256) {
      s.q_full.arrive_expect(sizeof s.q);
      for (int p = 0; p < kPanels; ++p) {
        tma_load(shared_address(s.q[p]), q_map, s.q_full, p * 64, head0, t);
      }
    }
    Gather tile0(x.kv, x.kv_stride, tid - 256), tile1 = tile0;
    const uint32_t kv0 = shared_address(s.kv[0]), kv1 = shared_address(s.kv[1]);
    // What cp.async wrote is visible to wgmma after its writer's fence.
    const auto landed = [&](int part) {
      fence_async();
      s.full[part].arrive();
    };
    for (int pair = 0; pair < pairs; ++pair) {
      const uint32_t parity = pair & 1;
      tile0.set_tile(s.id, pair * 2 * kTileKeys, count);
      tile1.set_tile(s.id, pair * 2 * kTileKeys + kTileKeys, count);
      s.empty[kA].wait(parity ^ 1);
#pragma unroll
      for (int p = 0; p < 4; ++p) tile0.copy_panel(kv0 + p * kPanelBytes, p);
      commit_copies();
      s.empty[kB].wait(parity ^ 1);
#pragma unroll
      for (int p = 4; p < 8; ++p) tile1.copy_panel(kv1 + p * kPanelBytes, p);
      commit_copies();
      wait_copies<1>();
      landed(kA);
      wait_copies<0>();
      landed(kB);
      s.empty[kC].wait(parity ^ 1);
#pragma unroll
      for (int p = 0; p < 4; ++p) tile1.copy_panel(kv1 + p * kPanelBytes, p);
      tile1.copy_panel(kv1 + 8 * kPanelBytes, 8);
      commit_copies();
      s.empty[kD].wait(parity ^ 1);
#pragma unroll
      for (int p = 4; p < 9; ++p) tile0.copy_panel(kv0 + p * kPanelBytes, p);
      commit_copies();
      wait_copies<1>();
      landed(kC);
      wait_copies<0>();
      landed(kD);
    }
    return;
  }

  take_registers<216>();
  const int lane = tid % 32, warp = tid % 128 / 32, c = lane % 4;
  const int row = warp * 16 + lane / 4;  // and row + 8
  if (pairs == 0) {
    for (int h = tid / 64; h < kMlaHeads && head0 + h < x.heads; h += 4) {
      const int64_t at = head0 + h;
      uint4* o = reinterpret_cast<uint4*>(&x.o_THV(t, at, 0));
      o[tid % 64] = uint4{0, 0, 0, 0};
      if (tid % 64 == 0) x.lse_TH(t, at) = INFINITY;
    }
    return;
  }
  const float scale2 = x.scale * 1.44269504f;  // for powers of 2
  const uint64_t q_desc = matrix_descriptor<kMajorK>(shared_address(s.q));
  const uint64_t key_desc =
      matrix_descriptor<kMajorK>(shared_address(s.kv[group]));
  const uint64_t my_values = matrix_descriptor<kMajorMN>(
      shared_address(s.kv[group][4 * group]), kPanelBytes);
  const uint64_t other_values = matrix_descriptor<kMajorMN>(
      shared_address(s.kv[group ^ 1][4 * group]), kPanelBytes);
  const uint32_t my_p = shared_address(s.kv[group][8]);
  const uint64_t other_p =
      matrix_descriptor<kMajorK>(shared_address(s.kv[group ^ 1][8]));
  float o[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] = 0;
  float m[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};

  s.q_full.wait(0);
  for (int pair = 0; pair < pairs; ++pair) {
    const uint32_t parity = pair & 1;
    float score[32];
    const auto dot_panel = [&](int p, bool first) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint64_t at =
            (p * kPanelBytes >> 4) + step * kDescriptorStep<kMajorK>;
        wgmma<64, kMajorK, kMajorK>(score, q_desc + at, key_desc + at,
                                    first && step == 0);
      }
    };
    wgmma_fence();
    // Both orders of panels add to one sum; which part comes first differs.
    const int first = group == 0 ? 0 : 4;
    s.full[group == 0 ? kA : kB].wait(parity);
#pragma unroll
    for (int p = 0; p < 4; ++p) dot_panel(first + p, p == 0);
    s.full[group == 0 ? kD : kC].wait(parity);
#pragma unroll
    for (int p = 0; p < 4; ++p) dot_panel((first ^ 4) + p, false);
    dot_panel(8, false);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(score);

    const int valid = count - (pair * 2 + group) * kTileKeys;
    if (valid < kTileKeys) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (8 * j + 2 * c + e >= valid) {
            score[4 * j + e] = score[4 * j + 2 + e] = -INFINITY;
          }
        }
      }
    }
    float high[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        high[i] = fmaxf(high[i],
                        fmaxf(score[4 * j + 2 * i], score[4 * j + 2 * i + 1]));
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      high[i] = fmaxf(high[i], __shfl_xor_sync(~0u, high[i], 1));
      high[i] = fmaxf(high[i], __shfl_xor_sync(~0u, high[i], 2));
      if (c == 0) s.row_max[group][row + 8 * i] = high[i];
    }
    // All scores are done here, so rope panels may take probabilities.
    named_barrier_sync(kMaxima, 256);
    float shift[2], shrink[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float both = fmaxf(high[i], s.row_max[group ^ 1][row + 8 * i]);
      const float now = fmaxf(m[i], both);
      // Where every score is -inf, 0 stands for their maximum.
      shift[i] = now == -INFINITY ? 0 : now * scale2;
      shrink[i] = exp2_fast(m[i] * scale2 - shift[i]);
      m[i] = now;
    }
    if (__any_sync(~0u, shrink[0] != 1 || shrink[1] != 1)) {
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        o[4 * j] *= shrink[0];
        o[4 * j + 1] *= shrink[0];
        o[4 * j + 2] *= shrink[1];
        o[4 * j + 3] *= shrink[1];
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float part = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& p = score[4 * j + 2 * i + e];
          p = exp2_fast(fmaf(p, scale2, -shift[i]));
          part += p;
        }
      }
      sum[i] = fmaf(sum[i], shrink[i], part);
    }
    uint32_t p[16];
    pack_rows(score, p);
    store_panel(my_p, p);
    fence_async();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma<256, kMajorMN>(o, p[4 * k], p[4 * k + 1], p[4 * k + 2],
                           p[4 * k + 3],
                           my_values + k * kDescriptorStep<kMajorMN>);
    }
    wgmma_commit();
    named_barrier_sync(kProbabilities, 256);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma<256, kMajorK, kMajorMN>(
          o, other_p + k * kDescriptorStep<kMajorK>,
          other_values + k * kDescriptorStep<kMajorMN>);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (lane == 0) s.empty[group == 0 ? kA : kB].arrive();
    wgmma_wait<0>();
    if (lane == 0) s.empty[group == 0 ? kC : kD].arrive();
    wgmma_pin(o);
  }

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
    sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
    if (c == 0) s.row_sum[group][row + 8 * i] = sum[i];
  }
  named_barrier_sync(kMaxima, 256);
  float inverse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float total = s.row_sum[0][row + 8 * i] + s.row_sum[1][row + 8 * i];
    inverse[i] = 1 / total;
    if (group == 0 && c == 0 && head0 + row + 8 * i < x.heads) {
      x.lse_TH(t, head0 + row + 8 * i) = m[i] * x.scale + logf(total);
    }
  }
  // q is not needed any more: o goes through its place to whole lines.
  const uint32_t stage = shared_address(s.q[4 * group]);
#pragma unroll
  for (int panel = 0; panel < 4; ++panel) {
    uint32_t out[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float scale = inverse[i % 2];
      out[i] = pack_bf16(o[panel * 32 + 2 * i] * scale,
                         o[panel * 32 + 2 * i + 1] * scale);
    }
    store_panel(stage + panel * kPanelBytes, out);
  }
  named_barrier_sync(kGroup + group, 128);
#pragma unroll
  for (int panel = 0; panel < 4; ++panel) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = tid % 128 / 8 + 16 * i, piece = tid % 8;
      if (head0 + h >= x.heads) continue;
      const uint4 v =
          load_shared(stage + panel * kPanelBytes + panel_offset(h, piece));
      *reinterpret_cast<uint4*>(
          &x.o_THV(t, head0 + h, group * 256 + panel * 64 + piece * 8)) = v;
    }
  }
}

}  // namespace tapeline::cuda::sparse_detail
