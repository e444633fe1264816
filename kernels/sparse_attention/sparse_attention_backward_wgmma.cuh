// The backward kernels: private to sparse_attention_backward_wgmma.cu and to
// what times them.
//
// A block has one query's 64 heads and takes its keys 64 at a time. Of a tile,
//
//   group 0 scores keys, p = exp(q k - lse)      group 1: dp = do v
//                                                ds = p (dp - delta) scale
//   group 0 adds ds k to dq, panels 0-3 and 8    group 1: panels 4-7
//   (now the tile's keys are not needed, and the next ones are loaded)
//   group 0: ds^T q + p^T do, panels 0-3 and 8   group 1: panels 4-7
//
// and the last, a key row's gradient from this query, goes out as bf16. Another
// kernel adds the rows of each key in the order of the inverse index.
#pragma once

#include "kernels/sparse_attention/sparse_attention_wgmma.cuh"

namespace tapeline::cuda::sparse_detail {

struct BackwardShared {
  alignas(1024) char q[kPanels][kPanelBytes];
  alignas(1024) char dout[kValuePanels][kPanelBytes];
  alignas(1024) char kv[kPanels][kPanelBytes];
  alignas(1024) char p[kPanelBytes], ds[kPanelBytes];  // head rows, key columns
  float lse2[kMlaHeads], delta[kMlaHeads];
  Barrier loaded, full, empty;
};

struct BackwardProblem {
  const bf16* kv;
  int64_t kv_stride;
  int heads, head_blocks, slots;
  int first;              // query of block 0
  const int32_t* ids;     // [T, K], valid ones first
  const uint16_t* slot;   // where each stood
  const int32_t* counts;  // [T]
  Rows<const bf16, 3> do_THV, o_THV;
  Rows<const float, 2> lse_TH;
  float scale;
  Rows<bf16, 3> dq_THD;
  bf16* rows;  // [chunk, K, head_blocks, D]
};

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    compact_rows(Rows<const int32_t, 2> ids_TK, int slots, int keys,
                 int32_t* ids, uint16_t* slot, int32_t* counts) {
  __shared__ int32_t id[kMlaMaxIds];
  __shared__ uint16_t from[kMlaMaxIds];
  __shared__ int parts[kThreads / kWarp];
  const int64_t t = blockIdx.x;
  const int count =
      compact_ids<kThreads>(ids_TK.row(t), slots, keys, id, from, parts);
  for (int j = threadIdx.x; j < count; j += kThreads) {
    ids[t * slots + j] = id[j];
    slot[t * slots + j] = from[j];
  }
  if (threadIdx.x == 0) counts[t] = count;
}

enum : int { kHaveP = 1, kHaveDs, kRowsDone, kDone };  // named barriers

// What a math group does. Groups are two functions, so that no multiply stands
// in a branch that the compiler takes for divergent.
template <int kGroup>
__device__ __forceinline__ void backward_group(BackwardShared& s,
                                               const BackwardProblem& x, int t,
                                               int local, int head_block,
                                               int count) {
  const int tid = static_cast<int>(threadIdx.x);
  const int head0 = head_block * kMlaHeads;
  const int tiles = (count + kTileKeys - 1) / kTileKeys;
  const int64_t row_of_ids = static_cast<int64_t>(t) * x.slots;
  const int lane = tid % 32, warp = tid % 128 / 32, c = lane % 4;
  const int row = warp * 16 + lane / 4;  // and row + 8
  // delta = do . o, a warp a row.
  for (int h = tid / 32; h < kMlaHeads; h += 8) {
    float sum = 0;
    const bool real = head0 + h < x.heads;
    if (real) {
      using V = Pack<bf16>;
      const V* a = reinterpret_cast<const V*>(&x.do_THV(t, head0 + h, 0));
      const V* b = reinterpret_cast<const V*>(&x.o_THV(t, head0 + h, 0));
#pragma unroll
      for (int i = 0; i < kMlaValueDim / 8 / kWarp; ++i) {
        const V va = a[i * kWarp + lane], vb = b[i * kWarp + lane];
#pragma unroll
        for (int e = 0; e < 8; ++e) sum += load(va.at[e]) * load(vb.at[e]);
      }
    }
    sum = warp_sum(sum);
    if (lane == 0) {
      s.delta[h] = sum;
      s.lse2[h] = real ? x.lse_TH(t, head0 + h) * kLog2e : INFINITY;
    }
  }
  named_barrier_sync(kDone, 256);
  float stat[2];  // group 0: lse in powers of 2, group 1: delta
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    stat[i] = kGroup == 0 ? s.lse2[row + 8 * i] : s.delta[row + 8 * i];
  }
  const float scale2 = x.scale * kLog2e;
  // The softmax of one score is 1 whatever the score, so its gradient is 0.
  const float ds_scale = count == 1 ? 0 : x.scale;

  const uint32_t p_at = shared_address(s.p), ds_at = shared_address(s.ds);
  const uint64_t left = matrix_descriptor<kMajorK>(
      kGroup == 0 ? shared_address(s.q) : shared_address(s.dout));
  const uint64_t keys = matrix_descriptor<kMajorK>(shared_address(s.kv));
  const uint64_t ds_rows = matrix_descriptor<kMajorK>(ds_at);
  const uint64_t ds_columns = matrix_descriptor<kMajorMN>(ds_at, kPanelBytes);
  const uint64_t p_columns = matrix_descriptor<kMajorMN>(p_at, kPanelBytes);
  const auto key_panel = [&](int p) {
    return matrix_descriptor<kMajorMN>(shared_address(s.kv[p]), kPanelBytes);
  };
  constexpr uint64_t kStepK = kDescriptorStep<kMajorK>;
  constexpr uint64_t kStepMN = kDescriptorStep<kMajorMN>;

  float dq[128], dq_rope[32];  // of 4 panels; of panel 8 (group 0)
#pragma unroll
  for (int i = 0; i < 128; ++i) dq[i] = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) dq_rope[i] = 0;
  s.loaded.wait(0);
  if constexpr (kGroup == 1) named_barrier_arrive(kRowsDone, 256);
  for (int tile = 0; tile < tiles; ++tile) {
    const int valid = count - tile * kTileKeys;
    float acc[32];
    s.full.wait(tile & 1);
    wgmma_fence();
#pragma unroll
    for (int p = 0; p < kValuePanels; ++p) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint64_t at = (p * kPanelBytes >> 4) + step * kStepK;
        wgmma<64, kMajorK, kMajorK>(acc, left + at, keys + at,
                                    p == 0 && step == 0);
      }
    }
    if constexpr (kGroup == 0) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint64_t at = (kValuePanels * kPanelBytes >> 4) + step * kStepK;
        wgmma<64, kMajorK, kMajorK>(acc, left + at, keys + at);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(acc);
    uint32_t packed[16];
    if constexpr (kGroup == 0) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float p = exp2_fast(fmaf(acc[4 * j + i], scale2, -stat[i / 2]));
          acc[4 * j + i] = 8 * j + 2 * c + i % 2 < valid ? p : 0;
        }
      }
      pack_rows(acc, packed);
      named_barrier_sync(kRowsDone, 256);  // group 1 has read p
      store_panel(p_at, packed);
      fence_async();
      named_barrier_arrive(kHaveP, 256);
    } else {
      named_barrier_sync(kHaveP, 256);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t pair;
          asm volatile("ld.shared.u32 %0, [%1];"
                       : "=r"(pair)
                       : "r"(p_at + panel_offset(row + 8 * half, j) + c * 4)
                       : "memory");
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float p =
                __uint_as_float(e == 0 ? pair << 16 : pair & 0xffff0000);
            float& v = acc[4 * j + 2 * half + e];
            v = p * (v - stat[half]) * ds_scale;
            if (8 * j + 2 * c + e >= valid) v = 0;
          }
        }
      }
      pack_rows(acc, packed);
      store_panel(ds_at, packed);
      fence_async();
    }
    named_barrier_sync(kHaveDs, 256);

    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma<256, kMajorK, kMajorMN>(dq, ds_rows + k * kStepK,
                                    key_panel(4 * kGroup) + k * kStepMN);
    }
    if constexpr (kGroup == 0) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma<64, kMajorK, kMajorMN>(dq_rope, ds_rows + k * kStepK,
                                     key_panel(8) + k * kStepMN);
      }
    }
    wgmma_commit();

    // Rows `row` and `row + 8` of the tile, where they go.
    bf16* to[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int j = tile * kTileKeys + row + 8 * i;
      const int slot = j < count ? x.slot[row_of_ids + j] : 0;
      to[i] = x.rows +
              ((static_cast<int64_t>(local) * x.slots + slot) * x.head_blocks +
               head_block) *
                  kMlaDim;
    }
    const auto key_rows = [&](int p, bool value, bool free_keys) {
      const uint64_t q =
          matrix_descriptor<kMajorMN>(shared_address(s.q[p]), kPanelBytes);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma<64, kMajorMN, kMajorMN>(acc, ds_columns + k * kStepMN,
                                      q + k * kStepMN, k == 0);
      }
      if (value) {
        const uint64_t dout =
            matrix_descriptor<kMajorMN>(shared_address(s.dout[p]), kPanelBytes);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          wgmma<64, kMajorMN, kMajorMN>(acc, p_columns + k * kStepMN,
                                        dout + k * kStepMN);
        }
      }
      wgmma_commit();
      if (free_keys) {
        wgmma_wait<1>();  // dq
        if (lane == 0) s.empty.arrive();
      }
      wgmma_wait<0>();
      wgmma_pin(acc);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int quarter = 0; quarter < 2; ++quarter) {
          uint32_t v[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int at = (quarter * 4 + i) * 4 + half * 2;
            v[i] = pack_bf16(acc[at], acc[at + 1]);
          }
          transpose_quad(v);
          if (row + 8 * half < valid) {
            __stcs(reinterpret_cast<uint4*>(to[half] + p * 64 + quarter * 32 +
                                            c * 8),
                   uint4{v[0], v[1], v[2], v[3]});
          }
        }
      }
    };
    key_rows(4 * kGroup, true, true);
#pragma unroll 1
    for (int p = 4 * kGroup + 1; p < 4 * kGroup + 4; ++p) {
      key_rows(p, true, false);
    }
    if constexpr (kGroup == 0) key_rows(8, false, false);
    if (kGroup == 1 && tile + 1 < tiles) named_barrier_arrive(kRowsDone, 256);
  }
  wgmma_pin(dq);
  wgmma_pin(dq_rope);

  // Through the place of q, which nobody reads any more.
  named_barrier_sync(kDone, 256);
  const auto stage = [&](const float* sums, int panel) {
    uint32_t out[16];
#pragma unroll
    for (int i = 0; i < 16; ++i)
      out[i] = pack_bf16(sums[2 * i], sums[2 * i + 1]);
    store_panel(shared_address(s.q[panel]), out);
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) stage(dq + 32 * i, 4 * kGroup + i);
  if constexpr (kGroup == 0) stage(dq_rope, 8);
  named_barrier_sync(kDone, 256);
  for (int i = tid; i < kMlaHeads * kPanels * 8; i += 256) {
    const int piece = i % 8, panel = i / 8 % kPanels, h = i / 8 / kPanels;
    if (head0 + h >= x.heads) continue;
    *reinterpret_cast<uint4*>(&x.dq_THD(t, head0 + h, panel * 64 + piece * 8)) =
        load_shared(shared_address(s.q[panel]) + panel_offset(h, piece));
  }
}

__global__ void __launch_bounds__(384, 1)
    backward_tiles(const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap do_map,
                   BackwardProblem x) {
  extern __shared__ __align__(1024) char raw[];
  BackwardShared& s = *reinterpret_cast<BackwardShared*>(raw);
  const int tid = static_cast<int>(threadIdx.x);
  const int group = tid / 128;
  const int local = static_cast<int>(blockIdx.x) / x.head_blocks;
  const int t = x.first + local;
  const int head_block = static_cast<int>(blockIdx.x) % x.head_blocks;
  const int head0 = head_block * kMlaHeads;
  const int count = x.counts[t];
  const int tiles = (count + kTileKeys - 1) / kTileKeys;
  const int64_t row_of_ids = static_cast<int64_t>(t) * x.slots;

  if (tiles == 0) {
    for (int i = tid; i < kMlaHeads * kMlaDim / 8; i += 384) {
      const int h = head0 + i / (kMlaDim / 8), piece = i % (kMlaDim / 8);
      if (h < x.heads) {
        *reinterpret_cast<uint4*>(&x.dq_THD(t, h, piece * 8)) =
            uint4{0, 0, 0, 0};
      }
    }
    return;
  }
  if (tid == 0) {
    s.loaded.init(1);
    s.full.init(128);
    s.empty.init(8);
    fence_barriers();
  }
  __syncthreads();
  if (tid == 256) {
    s.loaded.arrive_expect(sizeof s.q + sizeof s.dout);
    for (int p = 0; p < kPanels; ++p) {
      tma_load(shared_address(s.q[p]), q_map, s.loaded, p * 64, head0, t);
    }
    for (int p = 0; p < kValuePanels; ++p) {
      tma_load(shared_address(s.dout[p]), do_map, s.loaded, p * 64, head0, t);
    }
  }

  if (group == 2) {
    give_registers<40>();
    Gather tile(x.kv, x.kv_stride, tid - 256);
    const uint32_t kv = shared_address(s.kv);
    for (int i = 0; i < tiles; ++i) {
      tile.set_tile(x.ids + row_of_ids, i * kTileKeys, count);
      s.empty.wait((i & 1) ^ 1);
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        tile.copy_panel(kv + p * kPanelBytes, p);
      }
      commit_copies();
      wait_copies<0>();
      fence_async();
      s.full.arrive();
    }
    return;
  }

  take_registers<232>();
  if (group == 0) {
    backward_group<0>(s, x, t, local, head_block, count);
  } else {
    backward_group<1>(s, x, t, local, head_block, count);
  }
}

struct SumProblem {
  const bf16* rows;  // of entries [first, last)
  int first, last, head_blocks, keys;
  Rows<const int32_t, 1> offsets_S1, entries;
  int32_t* next;  // [S]
  float* sums;    // [S, D], or null where there is one chunk
  bf16* dkv;
  int64_t dkv_stride;
  bool from_zero, finish;
};

// 72 threads a key, 16 bytes of its row each; entries are added one by one in
// their order, and the blocks of heads of each, from where the chunk before
// stopped. kBlocks of heads, or 0 for any number.
constexpr int kSumThreads = kMlaDim / 8;
constexpr int kSumKeys = 4;  // of a block
template <int kBlocks>
__global__ void __launch_bounds__(kSumThreads* kSumKeys)
    sum_rows(SumProblem x) {
  using V = Pack<bf16>;
  const int tid = static_cast<int>(threadIdx.x);
  const int piece = tid % kSumThreads;
  const int64_t key =
      static_cast<int64_t>(blockIdx.x) * kSumKeys + tid / kSumThreads;
  if (key >= x.keys) return;
  int at = x.from_zero ? x.offsets_S1(key) : x.next[key];
  const int end = x.offsets_S1(key + 1);
  float4 kept[2] = {};
  float4* const sums =
      reinterpret_cast<float4*>(x.sums + key * kMlaDim + piece * 8);
  if (!x.from_zero) {
    kept[0] = sums[0];
    kept[1] = sums[1];
  }
  float sum[8] = {kept[0].x, kept[0].y, kept[0].z, kept[0].w,
                  kept[1].x, kept[1].y, kept[1].z, kept[1].w};
  const auto row = [&](int entry, int block) {
    const int64_t r =
        static_cast<int64_t>(entry - x.first) * x.head_blocks + block;
    return __ldcs(
        reinterpret_cast<const uint4*>(x.rows + r * kMlaDim + piece * 8));
  };
  const auto add = [&](const uint4& bits) {
    const V& v = reinterpret_cast<const V&>(bits);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum[e] += load(v.at[e]);
  };
  constexpr int kUnroll = kBlocks <= 1 ? 8 : 8 / kBlocks;
  for (bool more = true; more;) {
    int entry[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      entry[u] = at + u < end ? x.entries(at + u) : x.last;
    }
    if constexpr (kBlocks > 0) {
      uint4 v[kUnroll][kBlocks];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          if (entry[u] < x.last) v[u][b] = row(entry[u], b);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          if (entry[u] < x.last) add(v[u][b]);
        }
      }
    } else {
#pragma unroll 1
      for (int u = 0; u < kUnroll; ++u) {
        if (at + u >= end || x.entries(at + u) >= x.last) break;
        for (int b = 0; b < x.head_blocks; ++b) {
          add(row(x.entries(at + u), b));
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (entry[u] < x.last) {
        ++at;
      } else {
        more = false;
      }
    }
  }
  if (x.finish) {
    V out;
#pragma unroll
    for (int e = 0; e < 8; ++e) store(out.at[e], sum[e]);
    *reinterpret_cast<V*>(x.dkv + key * x.dkv_stride + piece * 8) = out;
    return;
  }
  sums[0] = float4{sum[0], sum[1], sum[2], sum[3]};
  sums[1] = float4{sum[4], sum[5], sum[6], sum[7]};
  if (piece == 0) x.next[key] = at;
}

}  // namespace tapeline::cuda::sparse_detail
