// A block has one query, 128 threads and a warpgroup's multiplies, and takes
// its keys 64 at a time while the next ones arrive:
//
//   x  [key, head]  = k . qI            ds = g w where x > 0
//   dq [head, d]   += ds^T k            in registers until the last tile
//   rows [key, d]   = ds qI             to the workspace, f32
//
// Another kernel adds the rows of each key. ds enters the products as two bf16
// numbers, itself and what rounding left: tensor cores have time for both, and
// gradients are as exact as if ds had stayed in f32.
#include "kernels/indexer_loss/indexer_loss_wgmma.h"
#include "kernels/sparse_attention/sparse_attention_wgmma.cuh"

namespace tapeline::cuda {
namespace {

using sparse_detail::compact_ids;
using sparse_detail::Gather;
using sparse_detail::kPanelBytes;
using sparse_detail::kTileKeys;
using sparse_detail::pack_rows;
using sparse_detail::store_panel;
using sparse_detail::transpose_quad;

constexpr int kThreads = 128;

template <int kPanels>
struct QueriesShared {
  alignas(1024) char q[kPanels][kPanelBytes];
  alignas(1024) char k[2][kPanels][kPanelBytes];
  // Key rows, head columns: rounded, and the rest.
  alignas(1024) char ds[2][kPanelBytes];
  int32_t id[kLossMaxIds];
  uint16_t slot[kLossMaxIds];
  float w[kLossHeads];
  float dw[kThreads / kWarp][kLossHeads];
  int parts[kThreads / kWarp];
};

struct QueriesProblem {
  Rows<const bf16, 3> q_THD;
  const bf16* k;
  int64_t k_stride;
  int keys, slots, heads;
  int first;  // query of block 0
  Rows<const float, 2> w_TH;
  Rows<const float, 1> dloss_T;
  Rows<const float, 2> dscore_TK;
  Rows<const int32_t, 2> ids_TK;
  float scale;
  Rows<bf16, 3> dq_THD;
  Rows<float, 2> dw_TH;
  float* rows;  // [chunk, K, D]
};

// Two blocks fit a processor's shared memory.
template <int kPanels>
__global__ void __launch_bounds__(kThreads, 2)
    indexer_loss_query_tiles_kernel(QueriesProblem x) {
  constexpr int kDim = 64 * kPanels;
  extern __shared__ __align__(1024) char raw[];
  auto& s = *reinterpret_cast<QueriesShared<kPanels>*>(raw);
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % kWarp, warp = tid / kWarp, c = lane % 4;
  const int row = warp * 16 + lane / 4;  // and row + 8
  const int t = x.first + static_cast<int>(blockIdx.x);

#pragma unroll
  for (int p = 0; p < kPanels; ++p) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = tid / 8 + 16 * i, piece = tid % 8;
      const bool real = h < x.heads;
      copy_async(shared_address(s.q[p]) + panel_offset(h, piece),
                 &x.q_THD(t, real ? h : 0, p * 64 + piece * 8), real);
    }
  }
  if (tid < kLossHeads) {
    s.w[tid] = tid < x.heads ? x.w_TH(t, tid) * x.scale : 0;
  }
  const int count = compact_ids<kThreads>(x.ids_TK.row(t), x.slots, x.keys,
                                          s.id, s.slot, s.parts);
  const int tiles = (count + kTileKeys - 1) / kTileKeys;
  Gather keys(x.k, x.k_stride, tid);
  const auto load_tile = [&](int tile) {
    keys.set_tile(s.id, tile * kTileKeys, count);
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      keys.copy_panel(shared_address(s.k[tile & 1][p]), p);
    }
    commit_copies();
  };
  if (tiles > 0) load_tile(0);

  const uint64_t q_k = matrix_descriptor<kMajorK>(shared_address(s.q));
  const uint64_t keys_k = matrix_descriptor<kMajorK>(shared_address(s.k));
  const uint64_t q_mn =
      matrix_descriptor<kMajorMN>(shared_address(s.q), kPanelBytes);
  const uint64_t keys_mn =
      matrix_descriptor<kMajorMN>(shared_address(s.k), kPanelBytes);
  const uint64_t ds_k = matrix_descriptor<kMajorK>(shared_address(s.ds));
  const uint64_t ds_mn =
      matrix_descriptor<kMajorMN>(shared_address(s.ds), kPanelBytes);
  constexpr uint64_t kPanelStep = kPanelBytes >> 4;
  constexpr uint64_t kStepK = kDescriptorStep<kMajorK>;
  constexpr uint64_t kStepMN = kDescriptorStep<kMajorMN>;
  const float dloss = x.dloss_T(t);
  float dq[kDim / 2], dw[16] = {};
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) dq[i] = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    wait_copies<0>();
    fence_async();
    __syncthreads();  // the tile is there, and the one before is done with
    if (tile + 1 < tiles) load_tile(tile + 1);
    const uint64_t stage = (tile & 1) * kPanels * kPanelStep;
    float acc[32];
    wgmma_fence();
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint64_t at = p * kPanelStep + step * kStepK;
        wgmma<64, kMajorK, kMajorK>(acc, keys_k + stage + at, q_k + at,
                                    p == 0 && step == 0);
      }
    }
    wgmma_commit();
    float g[2];
    float* to[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int j = tile * kTileKeys + row + 8 * i;
      const int slot = j < count ? s.slot[j] : 0;
      g[i] = j < count ? dloss * x.dscore_TK(t, slot) : 0;
      to[i] =
          j < count
              ? x.rows +
                    (static_cast<int64_t>(blockIdx.x) * x.slots + slot) * kDim
              : nullptr;
    }
    wgmma_wait<0>();
    wgmma_pin(acc);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 w = *reinterpret_cast<const float2*>(&s.w[8 * j + 2 * c]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& v = acc[4 * j + i];
        const float score = v * x.scale;
        const bool open = score > 0;
        if (open) dw[2 * j + i % 2] = fmaf(g[i / 2], score, dw[2 * j + i % 2]);
        v = open ? g[i / 2] * (i % 2 == 0 ? w.x : w.y) : 0;
      }
    }
    uint32_t ds[16];
    pack_rows(acc, ds);
    store_panel(shared_address(s.ds[0]), ds);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const uint32_t pair = ds[i / 2];
      acc[i] -= __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000);
    }
    pack_rows(acc, ds);
    store_panel(shared_address(s.ds[1]), ds);
    fence_async();
    __syncthreads();
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      wgmma<kDim, kMajorMN, kMajorMN>(
          dq, ds_mn + k / 4 * kPanelStep + k % 4 * kStepMN,
          keys_mn + stage + k % 4 * kStepMN);
    }
    wgmma_commit();
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      float sum[32];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        wgmma<64, kMajorK, kMajorMN>(
            sum, ds_k + k / 4 * kPanelStep + k % 4 * kStepK,
            q_mn + p * kPanelStep + k % 4 * kStepMN, k == 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(sum);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (to[half] == nullptr) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int at = 4 * j + 2 * half;
          __stcs(reinterpret_cast<float2*>(to[half] + p * 64 + 8 * j + 2 * c),
                 float2{sum[at], sum[at + 1]});
        }
      }
    }
  }
  commit_copies();  // of q, where there was no tile
  wait_copies<0>();
  wgmma_pin(dq);

  // 16 bytes at a time.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int h = row + 8 * half;
#pragma unroll
    for (int part = 0; part < 2 * kPanels; ++part) {
      uint32_t v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = (part * 4 + i) * 4 + half * 2;
        v[i] = pack_bf16(dq[at], dq[at + 1]);
      }
      transpose_quad(v);
      if (h < x.heads) {
        *reinterpret_cast<uint4*>(&x.dq_THD(t, h, part * 32 + c * 8)) =
            uint4{v[0], v[1], v[2], v[3]};
      }
    }
  }
  // The lanes of a column, then the warps.
#pragma unroll
  for (int i = 0; i < 16; ++i) {
#pragma unroll
    for (int step = 4; step < kWarp; step *= 2) {
      dw[i] += __shfl_xor_sync(~0u, dw[i], step);
    }
    if (lane < 4) s.dw[warp][8 * (i / 2) + 2 * c + i % 2] = dw[i];
  }
  __syncthreads();
  if (tid < x.heads) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kThreads / kWarp; ++w) sum += s.dw[w][tid];
    x.dw_TH(t, tid) = sum;
  }
}

struct KeysProblem {
  const float* rows;  // of entries [first, last)
  int first, last;
  bool all;  // those are all entries
  Rows<const int32_t, 1> offsets_S1, entries;
  float* sums;  // [S, D], or null where there is one chunk
  bf16* dk;
  int64_t dk_stride;
  bool from_zero, finish;
};

// The first of entries [begin, end), which ascend, that is not below `entry`.
__device__ inline int lower_bound(const Rows<const int32_t, 1>& entries,
                                  int begin, int end, int entry) {
  while (begin < end) {
    const int middle = begin + (end - begin) / 2;
    if (entries(middle) < entry) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// A block has a key. Its rows are cut into segments of one length, each of
// which a group of kDim / 4 threads adds in order, 16 bytes a thread; then the
// segments' sums are added in order.
constexpr int kSumThreads = 256;
template <int kDim>
__global__ void __launch_bounds__(kSumThreads)
    indexer_loss_sum_rows_kernel(KeysProblem x) {
  using V = Pack<float>;
  constexpr int kPieces = kDim / V::kSize, kSegments = kSumThreads / kPieces;
  constexpr int kAtOnce = 8;
  __shared__ float parts[kSegments][kDim];
  const int tid = static_cast<int>(threadIdx.x);
  const int piece = tid % kPieces, segment = tid / kPieces;
  const int64_t key = blockIdx.x;
  int begin = x.offsets_S1(key), end = x.offsets_S1(key + 1);
  if (!x.all) {
    begin = lower_bound(x.entries, begin, end, x.first);
    end = lower_bound(x.entries, begin, end, x.last);
  }
  const int each = (end - begin + kSegments - 1) / kSegments;
  const int from = min(end, begin + segment * each);
  const int to = min(end, from + each);
  float sum[V::kSize] = {};
  for (int i = from; i < to; i += kAtOnce) {
    V v[kAtOnce];
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) {
      if (i + e >= to) continue;
      const int64_t entry = x.entries(i + e) - x.first;
      v[e] = reinterpret_cast<const V*>(x.rows + entry * kDim)[piece];
    }
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) {
      if (i + e >= to) continue;
#pragma unroll
      for (int d = 0; d < V::kSize; ++d) sum[d] += v[e].at[d];
    }
  }
#pragma unroll
  for (int d = 0; d < V::kSize; ++d) {
    parts[segment][piece * V::kSize + d] = sum[d];
  }
  __syncthreads();
  if (tid >= kDim) return;
  float total = x.from_zero ? 0 : x.sums[key * kDim + tid];
#pragma unroll
  for (int i = 0; i < kSegments; ++i) total += parts[i][tid];
  if (x.finish) {
    store(x.dk[key * x.dk_stride + tid], total);
  } else {
    x.sums[key * kDim + tid] = total;
  }
}

template <int kPanels>
void launch_backward(Launch l, const IndexerLossPlan& plan, int64_t tokens,
                     QueriesProblem queries, KeysProblem keys) {
  constexpr int kShared = sizeof(QueriesShared<kPanels>);
  const auto kernel = indexer_loss_query_tiles_kernel<kPanels>;
  static const cudaError_t opted_in = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  CHECK(opted_in == cudaSuccess) << cudaGetErrorString(opted_in);
  const auto add = [&] {
    indexer_loss_sum_rows_kernel<64 * kPanels>
        <<<static_cast<unsigned>(queries.keys), kSumThreads, 0, stream_of(l)>>>(
            keys);
    check_launch("indexer_loss_backward");
  };
  if (tokens == 0) add();  // of no entry: zeros
  for (int64_t t = 0; t < tokens; t += plan.chunk) {
    const int64_t end = std::min(tokens, t + plan.chunk);
    queries.first = static_cast<int>(t);
    kernel<<<static_cast<unsigned>(end - t), kThreads, kShared, stream_of(l)>>>(
        queries);
    check_launch("indexer_loss_backward");
    keys.first = static_cast<int>(t * queries.slots);
    keys.last = static_cast<int>(end * queries.slots);
    keys.all = plan.chunk >= tokens;
    keys.from_zero = t == 0;
    keys.finish = end == tokens;
    add();
  }
}

}  // namespace

void indexer_loss_backward_wgmma(
    Launch l, const IndexerLossPlan& plan, View<const float> dscore_TK,
    View<const float> dloss_T, View<const bf16> qI_THD, View<const bf16> kI_SD,
    View<const float> w_TH, double index_scale, View<const int32_t> ids_TK,
    View<const int32_t> inverse_offsets_S1, View<const int32_t> inverse_entries,
    View<bf16> dqI_THD, View<bf16> dkI_SD, View<float> dw_TH,
    std::byte* workspace) {
  auto* key_rows = reinterpret_cast<float*>(workspace + plan.rows);
  const QueriesProblem queries{rows<3>(qI_THD),
                               kI_SD.data,
                               kI_SD.strides[0],
                               static_cast<int>(kI_SD.size(0)),
                               static_cast<int>(ids_TK.size(1)),
                               static_cast<int>(qI_THD.size(1)),
                               0,
                               rows<2>(w_TH),
                               rows<1>(dloss_T),
                               rows<2>(dscore_TK),
                               rows<2>(ids_TK),
                               static_cast<float>(index_scale),
                               rows<3>(dqI_THD),
                               rows<2>(dw_TH),
                               key_rows};
  const KeysProblem keys{key_rows,
                         0,
                         0,
                         true,
                         rows<1>(inverse_offsets_S1),
                         rows<1>(inverse_entries),
                         reinterpret_cast<float*>(workspace + plan.sums),
                         dkI_SD.data,
                         dkI_SD.strides[0],
                         true,
                         true};
  if (kI_SD.size(1) == 64) {
    return launch_backward<1>(l, plan, qI_THD.size(0), queries, keys);
  }
  launch_backward<2>(l, plan, qI_THD.size(0), queries, keys);
}

}  // namespace tapeline::cuda
