// A block has one query and takes its keys 64 at a time: rows of a multiply
// are keys, columns are heads. Loaders gather panels of 64 columns of a tile's
// keys into a ring, first those of attention, then the indexer's; two math
// groups take alternate tiles, so one multiplies while the other sums over
// heads. Scores and target of the whole row stay in shared memory.
#include "kernels/indexer_loss/indexer_loss_row.cuh"
#include "kernels/indexer_loss/indexer_loss_wgmma.h"
#include "kernels/sparse_attention/sparse_attention_wgmma.cuh"

namespace tapeline::cuda {
namespace {

using sparse_detail::compact_ids;
using sparse_detail::Gather;
using sparse_detail::kPanelBytes;
using sparse_detail::kPanels;
using sparse_detail::kTileKeys;
static_assert(kLossAttentionDim == kMlaDim && kLossMaxIds == kMlaMaxIds);

constexpr int kThreads = 384;
constexpr int kStages = 13;  // panels of the ring, all that fits
constexpr int kFlying = 10;  // panels that a loader has under way

template <int kIndexPanels>
struct ForwardShared {
  alignas(1024) char q[kPanels][kPanelBytes];
  alignas(1024) char qi[kIndexPanels][kPanelBytes];
  alignas(1024) char ring[kStages][kPanelBytes];
  float score[kLossMaxIds], target[kLossMaxIds];
  int32_t id[kLossMaxIds];
  uint16_t slot[kLossMaxIds];
  int parts[kThreads / kWarp];
  Barrier q_full, q_empty, full[kStages], empty[kStages];
};

struct ForwardProblem {
  const bf16 *kv, *ki;
  int64_t kv_stride, ki_stride;
  int keys, slots, heads, index_heads;
  Rows<const int32_t, 2> ids_TK;
  Rows<const float, 2> w_TH, lse_TH;
  float index_scale, attention_scale;
  float *loss, *dscore, *target;  // target may be null
  int64_t loss_stride, dscore_stride, target_stride;
};

// In each of the four lanes that share a row.
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Group `group`'s tiles with attention's heads from `head0` on and, kIndex, the
// indexer's. `panel` counts the panels of the ring before those of tile 0.
template <int kIndexPanels, bool kIndex>
__device__ __forceinline__ void score_tiles(ForwardShared<kIndexPanels>& s,
                                            const ForwardProblem& x, int t,
                                            int head0, int group, int tiles,
                                            int panel) {
  constexpr int kOfTile = kPanels + (kIndex ? kIndexPanels : 0);
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % kWarp, warp = tid % 128 / kWarp, c = lane % 4;
  float lse2[16], w[16];  // of this thread's columns
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int h = 8 * (i / 2) + 2 * c + i % 2;
    lse2[i] = head0 + h < x.heads ? x.lse_TH(t, head0 + h) * kLog2e : INFINITY;
    w[i] = kIndex && h < x.index_heads ? x.w_TH(t, h) * x.index_scale : 0;
  }
  const float scale2 = x.attention_scale * kLog2e;
  const uint64_t q = matrix_descriptor<kMajorK>(shared_address(s.q));
  const uint64_t qi = matrix_descriptor<kMajorK>(shared_address(s.qi));
  const uint64_t ring = matrix_descriptor<kMajorK>(shared_address(s.ring));
  constexpr uint64_t kPanelStep = kPanelBytes >> 4;

  for (int tile = group; tile < tiles; tile += 2) {
    Ring<kStages> at;
    at.slot = (panel + tile * kOfTile) % kStages;
    at.phase = (panel + tile * kOfTile) / kStages & 1;
    float p[32], index[32];
    int before = 0;  // slot of the panel before
#pragma unroll
    for (int i = 0; i < kOfTile; ++i) {
      s.full[at.slot].wait(at.parity());
      wgmma_fence();
      const uint64_t keys = ring + at.slot * kPanelStep;
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint64_t k = step * kDescriptorStep<kMajorK>;
        if (i < kPanels) {
          wgmma<64, kMajorK, kMajorK>(p, keys + k, q + i * kPanelStep + k,
                                      i == 0 && step == 0);
        } else {
          wgmma<64, kMajorK, kMajorK>(index, keys + k,
                                      qi + (i - kPanels) * kPanelStep + k,
                                      i == kPanels && step == 0);
        }
      }
      wgmma_commit();
      if (i > 0) {
        wgmma_wait<1>();
        if (lane == 0) s.empty[before].arrive();
      }
      before = at.slot;
      at.next();
    }
    wgmma_wait<0>();
    if (lane == 0) s.empty[before].arrive();
    wgmma_pin(p);
    if constexpr (kIndex) wgmma_pin(index);

    const int row = tile * kTileKeys + warp * 16 + lane / 4;  // and row + 8
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float target = 0, score = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 4 * j + 2 * half + e, column = 2 * j + e;
          target += exp2_fast(fmaf(p[i], scale2, -lse2[column]));
          if constexpr (kIndex) {
            // Keeps NaN.
            const float open = index[i] < 0 ? 0.0f : index[i];
            score = fmaf(w[column], open, score);
          }
        }
      }
      target = quad_sum(target);
      if constexpr (kIndex) score = quad_sum(score);
      if (c != 0) continue;
      if constexpr (kIndex) {
        s.score[row + 8 * half] = score;
        s.target[row + 8 * half] = target;
      } else {
        s.target[row + 8 * half] += target;
      }
    }
  }
}

template <int kIndexPanels>
__global__ void __launch_bounds__(kThreads, 1)
    indexer_loss_forward_tiles_kernel(
        const __grid_constant__ CUtensorMap q_map,
        const __grid_constant__ CUtensorMap qi_map, ForwardProblem x) {
  extern __shared__ __align__(1024) char raw[];
  auto& s = *reinterpret_cast<ForwardShared<kIndexPanels>*>(raw);
  const int tid = static_cast<int>(threadIdx.x), group = tid / 128;
  const int t = static_cast<int>(blockIdx.x);
  if (tid == 0) {
    s.q_full.init(1);
    s.q_empty.init(8);  // by each warp of the math groups
    for (int i = 0; i < kStages; ++i) {
      s.full[i].init(128);
      s.empty[i].init(4);  // by each warp of the group that read it
    }
    fence_barriers();
  }
  const int count = compact_ids<kThreads>(x.ids_TK.row(t), x.slots, x.keys,
                                          s.id, s.slot, s.parts);
  const int tiles = (count + kTileKeys - 1) / kTileKeys;
  const int passes = tiles == 0 ? 0 : (x.heads + kLossHeads - 1) / kLossHeads;

  if (group == 2) {
    Gather keys(x.kv, x.kv_stride, tid - 256);
    Gather index_keys(x.ki, x.ki_stride, tid - 256);
    Ring<kStages> next, landed;
    int flying = 0;
    // What cp.async wrote is visible to wgmma after its writer's fence.
    const auto land = [&] {
      fence_async();
      s.full[landed.slot].arrive();
      landed.next();
      --flying;
    };
    const auto load = [&](const Gather& from, int panel) {
      s.empty[next.slot].wait(next.parity() ^ 1);
      from.copy_panel(shared_address(s.ring[next.slot]), panel);
      commit_copies();
      next.next();
      if (++flying > kFlying) {
        wait_copies<kFlying>();
        land();
      }
    };
    for (int pass = 0; pass < passes; ++pass) {
      if (tid == 256) {
        if (pass > 0) s.q_empty.wait((pass - 1) & 1);
        s.q_full.arrive_expect(sizeof s.q + (pass == 0 ? sizeof s.qi : 0));
        for (int p = 0; p < kPanels; ++p) {
          tma_load(shared_address(s.q[p]), q_map, s.q_full, p * 64,
                   pass * kLossHeads, t);
        }
        for (int p = 0; pass == 0 && p < kIndexPanels; ++p) {
          tma_load(shared_address(s.qi[p]), qi_map, s.q_full, p * 64, 0, t);
        }
      }
      __syncwarp();
      for (int tile = 0; tile < tiles; ++tile) {
        keys.set_tile(s.id, tile * kTileKeys, count);
        index_keys.set_tile(s.id, tile * kTileKeys, count);
#pragma unroll 1
        for (int p = 0; p < kPanels; ++p) load(keys, p);
#pragma unroll 1
        for (int p = 0; pass == 0 && p < kIndexPanels; ++p) load(index_keys, p);
      }
      // The next pass begins with a wait for the math groups.
      wait_copies<0>();
      while (flying > 0) land();
    }
  } else if (passes > 0) {
    s.q_full.wait(0);
    score_tiles<kIndexPanels, true>(s, x, t, 0, group, tiles, 0);
    int panel = tiles * (kPanels + kIndexPanels);
    for (int pass = 1; pass < passes; ++pass) {
      if (tid % kWarp == 0) s.q_empty.arrive();
      s.q_full.wait(pass & 1);
      score_tiles<kIndexPanels, false>(s, x, t, pass * kLossHeads, group, tiles,
                                       panel);
      panel += tiles * kPanels;
    }
  }
  __syncthreads();
  const loss_detail::Row<float, uint16_t> row{s.score, s.target, s.slot, count};
  loss_detail::normalise_row<kThreads>(
      row, x.heads, x.slots,
      x.target == nullptr ? nullptr : x.target + t * x.target_stride);
  loss_detail::kl_row<kThreads>(row, x.slots, x.loss + t * x.loss_stride,
                                x.dscore + t * x.dscore_stride);
}

template <int kIndexPanels>
void launch_forward(Launch l, const View<const bf16>& q_THD,
                    const View<const bf16>& qI_THD, const ForwardProblem& x) {
  constexpr int kShared = sizeof(ForwardShared<kIndexPanels>);
  static_assert(kShared <= 227 << 10);
  static_assert(kLossHeads == kMlaHeads);  // of a box of heads_map()
  const auto kernel = indexer_loss_forward_tiles_kernel<kIndexPanels>;
  static const cudaError_t opted_in = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  CHECK(opted_in == cudaSuccess) << cudaGetErrorString(opted_in);
  kernel<<<static_cast<unsigned>(q_THD.size(0)), kThreads, kShared,
           stream_of(l)>>>(sparse_detail::heads_map(q_THD),
                           sparse_detail::heads_map(qI_THD), x);
  check_launch("indexer_loss_forward");
}

}  // namespace

void indexer_loss_forward_wgmma(Launch l, View<const bf16> qI_THD,
                                View<const bf16> kI_SD, View<const float> w_TH,
                                double index_scale, View<const bf16> q_THD,
                                View<const bf16> kv_SD,
                                View<const float> lse_TH,
                                double attention_scale,
                                View<const int32_t> ids_TK, View<float> loss_T,
                                View<float> dscore_TK, View<float> target_TK) {
  if (q_THD.size(0) == 0) return;
  const ForwardProblem x{kv_SD.data,
                         kI_SD.data,
                         kv_SD.strides[0],
                         kI_SD.strides[0],
                         static_cast<int>(kI_SD.size(0)),
                         static_cast<int>(ids_TK.size(1)),
                         static_cast<int>(q_THD.size(1)),
                         static_cast<int>(qI_THD.size(1)),
                         rows<2>(ids_TK),
                         rows<2>(w_TH),
                         rows<2>(lse_TH),
                         static_cast<float>(index_scale),
                         static_cast<float>(attention_scale),
                         loss_T.data,
                         dscore_TK.data,
                         target_TK.data,
                         loss_T.strides[0],
                         dscore_TK.strides[0],
                         target_TK.data == nullptr ? 0 : target_TK.strides[0]};
  if (kI_SD.size(1) == 64) return launch_forward<1>(l, q_THD, qI_THD, x);
  launch_forward<2>(l, q_THD, qI_THD, x);
}

}  // namespace tapeline::cuda
