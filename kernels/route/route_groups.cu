// Routing tables by all processors, in two launches.
//
// Pairs are cut into groups, in order, a block each. The first launch counts a
// group's pairs by expert into the workspace. In the second every block adds up
// the counts that it needs: of all groups for the experts' first rows, of those
// before its own for where its pairs go on from there. Then it takes 1024 pairs
// at a time, in order: a warp finds how many of its pairs with the same expert
// precede each, and the counts of the warps before follow from a sum.
#include <algorithm>

#include "kernels/cuda_rows.cuh"
#include "kernels/route/route_cuda.h"

namespace tapeline::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
// More of either would make the sums over counts the longest part.
constexpr int64_t kMostGroups = 128;
constexpr int64_t kMostExperts = 512;
constexpr int64_t kPairsEach = 2 * kThreads;  // of a group, at least

struct Groups {
  int64_t pairs;  // of a group: a multiple of kThreads
  int64_t count;
};
Groups groups_of(int64_t pairs) {
  Groups out{};
  const int64_t each = ceil_div(pairs, kMostGroups);
  out.pairs = ceil_div(std::max(each, kPairsEach), kThreads) * kThreads;
  out.count = std::max<int64_t>(1, ceil_div(pairs, out.pairs));
  return out;
}
// Experts are taken four at a time.
__host__ __device__ int64_t padded(int64_t experts) {
  return (experts + 3) / 4 * 4;
}

__device__ int32_t id_of(const Rows<const int32_t, 2>& ids, int64_t pair,
                         int64_t end) {
  if (pair >= end) return -1;
  const Division at = divide(pair, ids.size[1]);
  return ids(at.quotient, at.rest);
}

__global__ void __launch_bounds__(kThreads)
    route_count_groups_kernel(Rows<const int32_t, 2> ids, int experts,
                              int64_t each, int32_t* counts) {
  __shared__ int32_t count[kMostExperts];
  for (int e = threadIdx.x; e < kMostExperts; e += kThreads) count[e] = 0;
  __syncthreads();
  const int64_t begin = int64_t{blockIdx.x} * each;
  const int64_t end = min(begin + each, ids.size[0] * ids.size[1]);
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const int32_t e = id_of(ids, i, end);
    if (e >= 0) atomicAdd(&count[e], 1);  // of integers: any order
  }
  __syncthreads();
  const int64_t row = padded(experts);
  for (int e = threadIdx.x; e < row; e += kThreads) {
    counts[int64_t{blockIdx.x} * row + e] = count[e];
  }
}

__global__ void __launch_bounds__(kThreads)
    route_place_groups_kernel(Rows<const int32_t, 2> ids, int experts,
                              int64_t each, const int32_t* counts,
                              int32_t* offsets, Rows<int32_t, 2> row,
                              int64_t capacity, int32_t* token, int32_t* slot) {
  extern __shared__ int4 shared[];
  __shared__ int32_t scan[kWarps];
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp, warp = thread / kWarp;
  const int groups = static_cast<int>(gridDim.x);
  const int me = static_cast<int>(blockIdx.x);
  const int width = static_cast<int>(padded(experts)), quads = width / 4;
  // Sums over the groups: a thread has four experts of every slices-th group.
  const int slices = min(kThreads / quads, groups);
  int4* const before_of = shared;                // [slices, quads]
  int4* const all_of = shared + slices * quads;  // [slices, quads]
  const int slice = thread / quads, quad = thread - slice * quads;
  if (slice < slices) {
    const int4* const from = reinterpret_cast<const int4*>(counts);
    int4 before{}, all{};
    constexpr int kAtOnce = 8;
    for (int g0 = slice; g0 < groups; g0 += kAtOnce * slices) {
      int4 c[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int g = g0 + k * slices;
        c[k] = g < groups ? from[g * quads + quad] : int4{};
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        all.x += c[k].x;
        all.y += c[k].y;
        all.z += c[k].z;
        all.w += c[k].w;
        if (g0 + k * slices >= me) continue;
        before.x += c[k].x;
        before.y += c[k].y;
        before.z += c[k].z;
        before.w += c[k].w;
      }
    }
    before_of[thread] = before;
    all_of[thread] = all;
  }
  __syncthreads();
  // A thread an expert; kMostExperts are fewer than threads.
  int32_t before = 0, all = 0;
  if (thread < experts) {
    for (int s = 0; s < slices; ++s) {
      before += reinterpret_cast<const int32_t*>(before_of)[s * width + thread];
      all += reinterpret_cast<const int32_t*>(all_of)[s * width + thread];
    }
  }
  int32_t sum = all;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int32_t other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == kWarp - 1) scan[warp] = sum;
  __syncthreads();  // also: shared is read no more
  int32_t first = sum - all, routed = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    first += w < warp ? scan[w] : 0;
    routed += scan[w];
  }
  if (me == 0 && thread < experts) offsets[thread] = first;
  if (me == 0 && thread == 0) offsets[experts] = routed;

  // next: the row of an expert's next pair. of_warp: counts of a warp's pairs,
  // then of those of the warps before it.
  int32_t* const next = reinterpret_cast<int32_t*>(shared);
  int32_t* const of_warp = next + width;  // [kWarps, width]
  if (thread < experts) next[thread] = first + before;
  const int64_t begin = int64_t{me} * each;
  const int64_t end = min(begin + each, ids.size[0] * ids.size[1]);
  for (int64_t step = begin; step < end; step += kThreads) {
    const int64_t i = step + thread;
    const int32_t e = id_of(ids, i, end);
    for (int k = thread; k < kWarps * width; k += kThreads) of_warp[k] = 0;
    const unsigned peers = __match_any_sync(~0u, e);
    const int earlier = __popc(peers & ((1u << lane) - 1));
    __syncthreads();
    if (e >= 0 && earlier == 0) of_warp[warp * width + e] = __popc(peers);
    __syncthreads();
    int32_t total = 0;
    if (thread < experts) {
      constexpr int kAtOnce = 8;
      for (int w0 = 0; w0 < kWarps; w0 += kAtOnce) {
        int32_t count[kAtOnce];
#pragma unroll
        for (int w = 0; w < kAtOnce; ++w) {
          count[w] = of_warp[(w0 + w) * width + thread];
        }
#pragma unroll
        for (int w = 0; w < kAtOnce; ++w) {
          of_warp[(w0 + w) * width + thread] = total;
          total += count[w];
        }
      }
    }
    __syncthreads();
    if (i < end) {
      const Division at = divide(i, ids.size[1]);
      const int32_t r =
          e >= 0 ? next[e] + of_warp[warp * width + e] + earlier : -1;
      row(at.quotient, at.rest) = r;
      if (r >= 0) {
        token[r] = static_cast<int32_t>(at.quotient);
        slot[r] = static_cast<int32_t>(at.rest);
      }
    }
    __syncthreads();
    if (thread < experts) next[thread] += total;
  }
  for (int64_t r = routed + int64_t{me} * kThreads + thread; r < capacity;
       r += int64_t{groups} * kThreads) {
    token[r] = slot[r] = -1;
  }
}

}  // namespace

size_t route_workspace_bytes(int64_t pairs, int64_t experts) {
  if (pairs == 0 || experts == 0 || experts > kMostExperts) return 0;
  return sizeof(int32_t) *
         static_cast<size_t>(groups_of(pairs).count * padded(experts));
}

void route_groups(Launch l, View<const int32_t> ids, View<int32_t> offsets,
                  View<int32_t> row, View<int32_t> token, View<int32_t> slot,
                  std::byte* workspace) {
  const int64_t experts = offsets.size(0) - 1, width = padded(experts);
  const Groups groups = groups_of(ids.elements());
  const auto blocks = static_cast<unsigned>(groups.count);
  auto* const counts = reinterpret_cast<int32_t*>(workspace);
  route_count_groups_kernel<<<blocks, kThreads, 0, stream_of(l)>>>(
      rows<2>(ids), static_cast<int>(experts), groups.pairs, counts);
  check_launch("route");
  // First the sums of slices, 32 bytes a thread; then next and of_warp.
  const size_t shared = std::max(sizeof(int32_t) * (kWarps + 1) * width,
                                 2 * sizeof(int4) * kThreads);
  cudaFuncSetAttribute(route_place_groups_kernel,
                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                       static_cast<int>(shared));
  route_place_groups_kernel<<<blocks, kThreads, shared, stream_of(l)>>>(
      rows<2>(ids), static_cast<int>(experts), groups.pairs, counts,
      offsets.data, rows<2>(row), token.size(0), token.data, slot.data);
  check_launch("route");
}

}  // namespace tapeline::cuda
