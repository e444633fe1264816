#include <algorithm>

#include "kernels/cuda_rows.cuh"
#include "kernels/route/route.h"
#include "kernels/route/route_cuda.h"

namespace tapeline::cuda {
namespace {

constexpr int kMaxWarps = 32;
constexpr size_t kMaxShared = 200 << 10;

// A block's shared memory: counts [kWarps, E] and sets of tokens [kWarps, E] of
// its warps, and counts [2, E] of the block and of all blocks.
constexpr size_t shared_bytes(int warps, int64_t experts) {
  return sizeof(int32_t) * static_cast<size_t>(2 * warps + 2) *
         static_cast<size_t>(experts);
}
// Of one warp at least.
static_assert(shared_bytes(1, kMaxRoutedExperts) <= kMaxShared);
int warps_for(int64_t experts) {
  int warps = kMaxWarps;
  while (warps > 1 && shared_bytes(warps, experts) > kMaxShared) warps /= 2;
  return warps;
}

// A warp's pairs of tokens [first, first + 32), a token a lane: f(slot, expert
// or -1) for slots in turn. Loads of several slots are in flight together.
template <class F>
__device__ void for_each_slot(const Rows<const int32_t, 2>& ids, int64_t t,
                              int64_t end, F f) {
  constexpr int kAtOnce = 8;
  const int top_k = static_cast<int>(ids.size[1]);
  for (int k0 = 0; k0 < top_k; k0 += kAtOnce) {
    int32_t e[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      e[k] = k0 + k < top_k && t < end ? ids(t, k0 + k) : -1;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (k0 + k < top_k) f(k0 + k, e[k]);
    }
  }
}

// A stable counting sort by one cluster. The tokens are cut into as many runs
// as it has warps, in order. Each warp counts its run by expert; counts become
// the first rows of every (expert, block, warp) by sums over experts, then
// blocks, then warps; and each warp gives its run rows, 32 tokens at a time: an
// expert's set of those that chose it tells how many precede a token. A token
// that chose an expert twice spoils that; then pairs are compared, 32 at a
// time.
__global__ void __launch_bounds__(kMaxWarps* kWarp)
    route_count_and_rank_kernel(Rows<const int32_t, 2> ids, int experts,
                                int32_t* offsets, Rows<int32_t, 2> row) {
  namespace cg = cooperative_groups;
  extern __shared__ int32_t shared[];
  __shared__ int32_t scan[kMaxWarps];
  const cg::cluster_group cluster = cg::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank());
  const int threads = static_cast<int>(blockDim.x), warps = threads / kWarp;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp, warp = thread / kWarp;
  int32_t* const of_warp = shared + warp * experts;
  unsigned* const chosen =
      reinterpret_cast<unsigned*>(shared) + (warps + warp) * experts;
  int32_t* const of_block = shared + 2 * warps * experts;
  int32_t* const of_all = of_block + experts;

  const int64_t tokens = ids.size[0], top_k = ids.size[1];
  const int64_t runs = int64_t{kCluster} * warps;
  const int64_t run = (tokens + runs * kWarp - 1) / (runs * kWarp) * kWarp;
  const int64_t begin = min((int64_t{rank} * warps + warp) * run, tokens);
  const int64_t end = min(begin + run, tokens);

  for (int i = thread; i < 2 * warps * experts; i += threads) shared[i] = 0;
  __syncthreads();
  for (int64_t t = begin + lane; t - lane < end; t += kWarp) {
    for_each_slot(ids, t, end, [&](int, int32_t e) {
      if (e >= 0) atomicAdd(&of_warp[e], 1);  // of integers: any order
    });
  }
  __syncthreads();
  for (int e = thread; e < experts; e += threads) {
    int32_t before = 0;
    constexpr int kAtOnce = 8;
    for (int w0 = 0; w0 < warps; w0 += kAtOnce) {
      int32_t count[kAtOnce];
#pragma unroll
      for (int w = 0; w < kAtOnce; ++w) {
        count[w] = w0 + w < warps ? shared[(w0 + w) * experts + e] : 0;
      }
#pragma unroll
      for (int w = 0; w < kAtOnce; ++w) {
        if (w0 + w < warps) shared[(w0 + w) * experts + e] = before;
        before += count[w];
      }
    }
    of_block[e] = before;
  }
  cluster.sync();
  int32_t before_blocks = 0;  // of a thread's experts: a contiguous piece
  const int piece = (experts + threads - 1) / threads;
  const int first = min(thread * piece, experts);
  const int last = min(first + piece, experts);
  for (int e = first; e < last; ++e) {
    int32_t before = 0, all = 0;
#pragma unroll
    for (int b = 0; b < static_cast<int>(kCluster); ++b) {
      const int32_t count = *cluster.map_shared_rank(&of_block[e], b);
      if (b < rank) before += count;
      all += count;
    }
    of_all[e] = before_blocks + before;  // within this thread's piece
    // Rows of all blocks' pairs of the experts up to this one.
    before_blocks += all;
  }
  // An exclusive scan of the pieces over the block.
  int32_t sum = before_blocks;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int32_t other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == kWarp - 1) scan[warp] = sum;
  cluster.sync();  // also: of_block is read no more
  int32_t base = sum - before_blocks, routed = 0;
  for (int w = 0; w < warps; ++w) {
    if (w < warp) base += scan[w];
    routed += scan[w];
  }
  for (int e = first; e < last; ++e) of_all[e] += base;
  __syncthreads();
  // A warp's first rows: its own to add, since it alone uses them.
  for (int e = lane; e < experts; e += kWarp) of_warp[e] += of_all[e];
  if (rank == 0) {
    // No pair of a block precedes the first one's.
    for (int e = thread; e < experts; e += threads) offsets[e] = of_all[e];
    if (thread == 0) offsets[experts] = routed;
  }
  __syncwarp();

  for (int64_t t = begin + lane; t - lane < end; t += kWarp) {
    const unsigned below = (1u << lane) - 1;
    bool twice = top_k > 64;
    for_each_slot(ids, t, end, [&](int, int32_t e) {
      if (e >= 0) twice |= atomicOr(&chosen[e], 1u << lane) >> lane & 1u;
    });
    const bool compare = __any_sync(~0u, twice);
    __syncwarp();
    if (!compare) {
      unsigned long long is_last = 0;  // of its expert's tokens, a bit a slot
      for_each_slot(ids, t, end, [&](int k, int32_t e) {
        const unsigned set = e >= 0 ? chosen[e] : 0;
        const int32_t r = e >= 0 ? of_warp[e] + __popc(set & below) : -1;
        if (t < end) row(t, k) = r;
        if (set >> lane == 1) is_last |= 1ull << k;
      });
      __syncwarp();
      // Who is last tells the next 32, and empties the set.
      for_each_slot(ids, t, end, [&](int k, int32_t e) {
        if (!(is_last >> k & 1)) return;
        of_warp[e] += __popc(chosen[e]);
        chosen[e] = 0;
      });
      __syncwarp();
      continue;
    }
    for (int e = lane; e < experts; e += kWarp) chosen[e] = 0;
    __syncwarp();
    const int64_t first = (t - lane) * top_k;
    const int64_t last = min(t - lane + kWarp, end) * top_k;
    for (int64_t i = first + lane; i - lane < last; i += kWarp) {
      const Division at = divide(i < last ? i : 0, top_k);
      const int32_t e = i < last ? ids(at.quotient, at.rest) : -1;
      const unsigned peers = __match_any_sync(~0u, e);
      const int earlier = __popc(peers & below);
      const int32_t r = e >= 0 ? of_warp[e] + earlier : -1;
      __syncwarp();
      if (e >= 0 && earlier == 0) of_warp[e] += __popc(peers);
      __syncwarp();
      if (i < last) row(at.quotient, at.rest) = r;
    }
  }
}

// The pairs of rows, which lie scattered: by all processors.
constexpr int kInvertThreads = 256;
__global__ void __launch_bounds__(kInvertThreads)
    route_invert_kernel(Rows<const int32_t, 2> row, const int32_t* routed,
                        int64_t capacity, int32_t* token, int32_t* slot) {
  const int64_t i = int64_t{blockIdx.x} * kInvertThreads + threadIdx.x;
  if (i < row.size[0] * row.size[1]) {
    const Division at = divide(i, row.size[1]);
    const int32_t r = row(at.quotient, at.rest);
    if (r >= 0) {
      token[r] = static_cast<int32_t>(at.quotient);
      slot[r] = static_cast<int32_t>(at.rest);
    }
  }
  if (i < capacity && i >= *routed) token[i] = slot[i] = -1;
}

}  // namespace

void route(Launch l, View<const int32_t> ids, View<int32_t> offsets,
           View<int32_t> row, View<int32_t> token, View<int32_t> slot) {
  const int64_t experts = offsets.size(0) - 1;
  const int warps = warps_for(experts);
  const size_t shared = shared_bytes(warps, experts);
  cudaFuncSetAttribute(route_count_and_rank_kernel,
                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                       static_cast<int>(kMaxShared));
  launch_clusters(l, route_count_and_rank_kernel, dim3(kCluster),
                  static_cast<unsigned>(warps * kWarp), shared, rows<2>(ids),
                  static_cast<int>(experts), offsets.data, rows<2>(row));
  check_launch("route");
  const int64_t items = std::max(ids.elements(), token.size(0));
  if (items == 0) return;
  route_invert_kernel<<<static_cast<unsigned>(ceil_div(items, kInvertThreads)),
                        kInvertThreads, 0, stream_of(l)>>>(
      rows<2>(View<const int32_t>(row)), &offsets.data[experts], token.size(0),
      token.data, slot.data);
  check_launch("route");
}

}  // namespace tapeline::cuda
