#include "kernels/cuda_rows.cuh"
#include "kernels/route/route_cuda.h"

namespace tapeline::cuda {
namespace {

constexpr int kMaxWarps = 32;
constexpr size_t kMaxShared = 200 << 10;

// A block's shared memory: counts [kWarps, E] of its warps, and [2, E] of the
// block and of all blocks.
size_t shared_bytes(int warps, int64_t experts) {
  return sizeof(int32_t) * static_cast<size_t>(warps + 2) *
         static_cast<size_t>(experts);
}
int warps_for(int64_t experts) {
  int warps = kMaxWarps;
  while (warps > 1 && shared_bytes(warps, experts) > kMaxShared) warps /= 2;
  return warps;
}

// A stable counting sort by one cluster. The pairs are cut into as many runs as
// it has warps, in order. Each warp counts its run by expert; counts become the
// first rows of every (expert, block, warp) by sums over experts, then blocks,
// then warps; and each warp places its run in order.
__global__ void __launch_bounds__(kMaxWarps* kWarp)
    count_and_place(Rows<const int32_t, 2> ids, int64_t experts,
                    int32_t* offsets, Rows<int32_t, 2> row, int64_t capacity,
                    int32_t* token, int32_t* slot) {
  namespace cg = cooperative_groups;
  extern __shared__ int32_t shared[];
  __shared__ int32_t scan[kMaxWarps];
  const cg::cluster_group cluster = cg::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank());
  const int threads = static_cast<int>(blockDim.x), warps = threads / kWarp;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp, warp = thread / kWarp;
  int32_t* const of_warp = shared + warp * experts;
  int32_t* const of_block = shared + warps * experts;
  int32_t* const of_all = of_block + experts;

  const int64_t pairs = ids.size[0] * ids.size[1], top_k = ids.size[1];
  const int64_t runs = int64_t{kCluster} * warps;
  // Whole warps, so that no two share a line of ids.
  const int64_t run = (pairs + runs * kWarp - 1) / (runs * kWarp) * kWarp;
  const int64_t begin = (int64_t{rank} * warps + warp) * run;
  const int64_t end = min(begin + run, pairs);

  for (int64_t i = thread; i < warps * experts; i += threads) shared[i] = 0;
  __syncthreads();
  for (int64_t i = begin + lane; i < end; i += kWarp) {
    const Division at = divide(i, top_k);
    const int32_t e = ids(at.quotient, at.rest);
    if (e >= 0) atomicAdd(&of_warp[e], 1);  // of integers: any order
  }
  __syncthreads();
  for (int64_t e = thread; e < experts; e += threads) {
    int32_t before = 0;
    for (int w = 0; w < warps; ++w) {
      const int32_t count = shared[w * experts + e];
      shared[w * experts + e] = before;
      before += count;
    }
    of_block[e] = before;
  }
  cluster.sync();
  int32_t before_blocks = 0;  // of a thread's experts: a contiguous piece
  const int64_t piece = (experts + threads - 1) / threads;
  const int64_t first = min(thread * piece, experts);
  const int64_t last = min(first + piece, experts);
  for (int64_t e = first; e < last; ++e) {
    int32_t before = 0, all = 0;
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
  for (int64_t e = first; e < last; ++e) of_all[e] += base;
  __syncthreads();
  for (int64_t i = thread; i < warps * experts; i += threads) {
    shared[i] += of_all[i % experts];
  }
  if (rank == 0) {
    // No pair of a block precedes the first one's.
    for (int64_t e = thread; e < experts; e += threads) offsets[e] = of_all[e];
    if (thread == 0) offsets[experts] = routed;
  }
  __syncthreads();

  for (int64_t i0 = begin; i0 < end; i0 += kWarp) {
    const int64_t i = i0 + lane;
    const Division at = divide(i < end ? i : 0, top_k);
    const int32_t e = i < end ? ids(at.quotient, at.rest) : -1;
    const unsigned peers = __match_any_sync(~0u, e);
    const int earlier = __popc(peers & ((1u << lane) - 1));
    const int32_t r = e >= 0 ? of_warp[e] + earlier : -1;
    __syncwarp();
    if (e >= 0 && earlier == 0) of_warp[e] += __popc(peers);
    __syncwarp();
    if (i < end) row(at.quotient, at.rest) = r;
    if (r >= 0) {
      token[r] = static_cast<int32_t>(at.quotient);
      slot[r] = static_cast<int32_t>(at.rest);
    }
  }
  for (int64_t r = routed + int64_t{rank} * threads + thread; r < capacity;
       r += int64_t{kCluster} * threads) {
    token[r] = slot[r] = -1;
  }
}

}  // namespace

void route(Launch l, View<const int32_t> ids, View<int32_t> offsets,
           View<int32_t> row, View<int32_t> token, View<int32_t> slot) {
  const int64_t experts = offsets.size(0) - 1;
  const int warps = warps_for(experts);
  const size_t shared = shared_bytes(warps, experts);
  CHECK_LE(shared, kMaxShared) << "[route] " << experts << " experts";
  cudaFuncSetAttribute(count_and_place,
                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                       static_cast<int>(kMaxShared));
  launch_clusters(l, count_and_place, dim3(kCluster),
                  static_cast<unsigned>(warps * kWarp), shared, rows<2>(ids),
                  experts, offsets.data, rows<2>(row), token.size(0),
                  token.data, slot.data);
  check_launch("route");
}

}  // namespace tapeline::cuda
