// Which pairs chose each key. Stable, without a sort: entries of a key ascend.
#include <algorithm>

#include "kernels/cuda_tile.cuh"
#include "kernels/sparse_attention/sparse_attention_cuda.h"

namespace tapeline::cuda {
namespace {

// Counts of whole numbers are the same in any order.
__global__ void __launch_bounds__(kTileThreads)
    invert_zero_kernel(Rows<int32_t, 1> offsets) {
  const int64_t i = blockIdx.x * int64_t{kTileThreads} + threadIdx.x;
  if (i < offsets.size[0]) offsets(i) = 0;
}

__global__ void __launch_bounds__(kTileThreads)
    invert_count_kernel(Rows<const int32_t, 2> ids, Rows<int32_t, 1> offsets) {
  const int64_t i = blockIdx.x * int64_t{kTileThreads} + threadIdx.x;
  const int64_t slots = ids.size[1];
  if (i >= ids.size[0] * slots) return;
  const int32_t id = ids(i / slots, i % slots);
  if (id >= 0) atomicAdd(&offsets(id), 1);
}

constexpr int kScanThreads = 1024;

// The sum of the values of the threads before this one, and of all, for a block
// of kScanThreads. `parts` holds one value a warp.
__device__ int32_t prefix_sum(int32_t value, int32_t* parts, int32_t& total) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  int32_t sum = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int32_t before = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += before;
  }
  __syncthreads();  // the call before this one has read
  if (lane == kWarp - 1) parts[warp] = sum;
  __syncthreads();
  int32_t part = parts[lane];
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int32_t before = __shfl_up_sync(~0u, part, step);
    if (lane >= step) part += before;
  }
  total = __shfl_sync(~0u, part, kWarp - 1);
  const int32_t warps_before = __shfl_sync(~0u, part, max(warp - 1, 0));
  return sum - value + (warp > 0 ? warps_before : 0);
}

// Counts become the places where entries begin. One block, whose threads have
// neighbouring keys.
__global__ void __launch_bounds__(kScanThreads)
    invert_scan_kernel(Rows<int32_t, 1> offsets) {
  __shared__ int32_t parts[kWarp];
  constexpr int kEach = 8;
  int32_t carry = 0;
  for (int64_t first = 0; first < offsets.size[0];
       first += kScanThreads * kEach) {
    const int64_t i = first + threadIdx.x * kEach;
    int32_t count[kEach], sum = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      count[e] = i + e < offsets.size[0] ? offsets(i + e) : 0;
      sum += count[e];
    }
    int32_t total;
    int32_t before = carry + prefix_sum(sum, parts, total);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (i + e < offsets.size[0]) offsets(i + e) = before;
      before += count[e];
    }
    carry += total;
  }
}

constexpr int kKeysPerBlock = 1024;  // at most: places in shared memory
constexpr int kIdsPerThread = 4;

// The entries of keys [begin, begin + keys). The block walks all ids in order;
// those of its keys are gathered, in order, and the first warp gives each its
// place.
__global__ void __launch_bounds__(kScanThreads)
    invert_fill_kernel(Rows<const int32_t, 2> ids,
                       Rows<const int32_t, 1> offsets, int keys_per_block,
                       Rows<int32_t, 1> entries) {
  __shared__ int32_t next[kKeysPerBlock], parts[kWarp];
  __shared__ int32_t found_key[kScanThreads * kIdsPerThread];
  __shared__ int32_t found_entry[kScanThreads * kIdsPerThread];
  const int64_t begin = blockIdx.x * int64_t{keys_per_block};
  const int64_t keys =
      min(int64_t{keys_per_block}, offsets.size[0] - 1 - begin);
  for (int s = threadIdx.x; s < keys; s += kScanThreads) {
    next[s] = offsets(begin + s);
  }
  const int64_t slots = ids.size[1], all = ids.size[0] * slots;
  constexpr int64_t kStep = kScanThreads * kIdsPerThread;
  for (int64_t first = 0; first < all; first += kStep) {
    const int64_t mine = first + threadIdx.x * kIdsPerThread;
    int32_t key[kIdsPerThread], matches = 0;
    int64_t t = mine / slots, j = mine % slots;
#pragma unroll
    for (int i = 0; i < kIdsPerThread; ++i) {
      key[i] = -1;
      if (mine + i < all) {
        const int64_t relative = ids(t, j) - begin;
        if (relative >= 0 && relative < keys) {
          key[i] = static_cast<int32_t>(relative);
          ++matches;
        }
      }
      if (++j == slots) {
        j = 0;
        ++t;
      }
    }
    int32_t found;
    int32_t at = prefix_sum(matches, parts, found);
    if (found == 0) continue;
#pragma unroll
    for (int i = 0; i < kIdsPerThread; ++i) {
      if (key[i] < 0) continue;
      found_key[at] = key[i];
      found_entry[at++] = static_cast<int32_t>(mine + i);
    }
    __syncthreads();
    if (threadIdx.x < kWarp) {
      const int lane = threadIdx.x;
      for (int32_t i = lane; i - lane < found; i += kWarp) {
        const int32_t k = i < found ? found_key[i] : -1;
        const unsigned equal = __match_any_sync(~0u, k);
        const unsigned below = equal & ((1u << lane) - 1);
        const int32_t place = k >= 0 ? next[k] + __popc(below) : 0;
        __syncwarp();
        if (k >= 0) {
          entries(place) = found_entry[i];
          if (below == 0) next[k] += __popc(equal);
        }
        __syncwarp();
      }
    }
    // The next prefix sum holds the barrier behind which found is free.
  }
}

// --- with a workspace --------------------------------------------------------

// Queries are cut into groups, in order, and keys into pieces; a block has a
// pair of both. Blocks count, the counts of a key become the places where its
// groups begin, and blocks place their pairs.
//
// A block takes up to 32 queries at a time. Each key has a word in shared
// memory, with a bit for each of the queries that chose it, in whatever order
// the bits were set: the bits below a query's tell how many entries of the key
// precede its own. A query that has a key twice spoils that; then 1024 pairs
// are taken at a time, and warps take turns.
constexpr int kPlaceThreads = 1024;
constexpr int kQueries = 32;
// Keys whose words and places fit into shared memory: of a block that has a
// processor to itself, and of one of two.
constexpr int64_t kLargePiece = 24576, kSmallPiece = 12288;
constexpr int64_t kProcessors = 132;  // of an H200

struct InvertPlan {
  int64_t piece;    // keys of a block
  int64_t pieces;   // of all keys
  int64_t queries;  // of a group
  int64_t groups;   // of all queries
  int64_t count_bytes() const { return piece * sizeof(int32_t); }
  int64_t place_bytes() const { return 2 * piece * sizeof(int32_t); }
};
InvertPlan invert_plan(int64_t queries, int64_t keys) {
  InvertPlan plan{};
  const bool small = keys <= kSmallPiece;
  plan.piece = std::min(keys, small ? kSmallPiece : kLargePiece);
  plan.pieces = ceil_div(keys, plan.piece);
  const int64_t blocks = (small ? 2 : 1) * kProcessors;
  plan.queries = ceil_div(queries, std::max<int64_t>(blocks / plan.pieces, 1));
  plan.groups = ceil_div(queries, plan.queries);
  return plan;
}

// A block's part of all pairs.
struct Group {
  int64_t begin, end;  // queries
  int64_t key;         // the piece's first
  int keys;
  __device__ Group(const InvertPlan& plan, int64_t all_queries,
                   int64_t all_keys) {
    begin = blockIdx.x * plan.queries;
    end = min(begin + plan.queries, all_queries);
    key = blockIdx.y * plan.piece;
    keys = static_cast<int>(min(all_keys - key, plan.piece));
  }
  // f(key in the piece, query, slot) for the pairs of queries [first, last)
  // whose key is in the piece; neighbouring threads have neighbouring slots.
  template <class F>
  __device__ void for_each(const Rows<const int32_t, 2>& ids, int64_t first,
                           int64_t last, F f) const {
    constexpr int kAtOnce = 8;
    const int slots = static_cast<int>(ids.size[1]);
    const int rows = static_cast<int>(last - first);
    // Where a thread goes next, without a division.
    const int row_step = kPlaceThreads / slots;
    const int slot_step = kPlaceThreads - row_step * slots;
    int row = static_cast<int>(threadIdx.x) / slots;
    int slot = static_cast<int>(threadIdx.x) - row * slots;
    while (row < rows) {
      int at[kAtOnce], of_row[kAtOnce], of_slot[kAtOnce];
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        of_row[e] = row;
        of_slot[e] = slot;
        const int64_t id =
            row < rows ? int64_t{ids.row(first + row)[slot]} - key : -1;
        at[e] = id >= 0 && id < keys ? static_cast<int>(id) : -1;
        row += row_step;
        slot += slot_step;
        if (slot >= slots) {
          slot -= slots;
          ++row;
        }
      }
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        if (at[e] >= 0) f(at[e], of_row[e], of_slot[e]);
      }
    }
  }
};

__global__ void __launch_bounds__(kPlaceThreads)
    invert_count_groups_kernel(InvertPlan plan, Rows<const int32_t, 2> ids,
                               int64_t all_keys, int32_t* counts) {
  extern __shared__ int32_t shared[];
  const Group group(plan, ids.size[0], all_keys);
  for (int s = threadIdx.x; s < group.keys; s += kPlaceThreads) shared[s] = 0;
  __syncthreads();
  group.for_each(ids, group.begin, group.end, [&](int key, int, int) {
    atomicAdd(&shared[key], 1);  // of integers: any order
  });
  __syncthreads();
  int32_t* const out = counts + blockIdx.x * all_keys + group.key;
  for (int s = threadIdx.x; s < group.keys; s += kPlaceThreads) {
    out[s] = shared[s];
  }
}

// A key's counts become those of the groups before; their sum is its count.
constexpr int kPrefixThreads = 64;
__global__ void __launch_bounds__(kPrefixThreads)
    invert_prefix_groups_kernel(int64_t groups, int32_t* counts,
                                Rows<int32_t, 1> offsets) {
  const int64_t keys = offsets.size[0] - 1;
  const int64_t s = int64_t{blockIdx.x} * kPrefixThreads + threadIdx.x;
  if (s > keys) return;
  int32_t before = 0;
  if (s < keys) {
    constexpr int kAtOnce = 32;
    for (int64_t g = 0; g < groups; g += kAtOnce) {
      int32_t count[kAtOnce];
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        count[e] = g + e < groups ? counts[(g + e) * keys + s] : 0;
      }
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        if (g + e < groups) counts[(g + e) * keys + s] = before;
        before += count[e];
      }
    }
  }
  offsets(s) = before;
}

// The pairs of queries [first, last) in order, warp by warp. Ends at a barrier.
__device__ void place_in_turns(const Rows<const int32_t, 2>& ids,
                               const Group& group, int64_t first, int64_t last,
                               int32_t* next, const Rows<int32_t, 1>& entries) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t slots = ids.size[1], end = last * slots;
  for (int64_t step = first * slots; step < end; step += kPlaceThreads) {
    const int64_t i = step + threadIdx.x;
    const int64_t id = i < end ? ids(i / slots, i % slots) - group.key : -1;
    const int key = id >= 0 && id < group.keys ? static_cast<int>(id) : -1;
    const unsigned equal = __match_any_sync(~0u, key);
    const unsigned below = equal & ((1u << lane) - 1);
    for (int w = 0; w < kPlaceThreads / kWarp; ++w) {
      if (w == warp) {
        const int32_t place = key >= 0 ? next[key] + __popc(below) : 0;
        __syncwarp();
        if (key >= 0) entries(place) = static_cast<int32_t>(i);
        if (key >= 0 && below == 0) next[key] += __popc(equal);
      }
      __syncthreads();
    }
  }
}

__global__ void __launch_bounds__(kPlaceThreads)
    invert_place_groups_kernel(InvertPlan plan, Rows<const int32_t, 2> ids,
                               int64_t all_keys, const int32_t* counts,
                               Rows<const int32_t, 1> offsets,
                               Rows<int32_t, 1> entries) {
  extern __shared__ int32_t shared[];
  const Group group(plan, ids.size[0], all_keys);
  int32_t* const next = shared;
  unsigned* const chosen = reinterpret_cast<unsigned*>(shared + plan.piece);
  const int32_t* const before = counts + blockIdx.x * all_keys + group.key;
  for (int s = threadIdx.x; s < group.keys; s += kPlaceThreads) {
    next[s] = offsets(group.key + s) + before[s];
    chosen[s] = 0;
  }
  __syncthreads();
  const int32_t slots = static_cast<int32_t>(ids.size[1]);
  for (int64_t first = group.begin; first < group.end; first += kQueries) {
    const int64_t last = min(first + kQueries, group.end);
    bool twice = false;
    group.for_each(ids, first, last, [&](int key, int query, int) {
      twice |= atomicOr(&chosen[key], 1u << query) >> query & 1u;
    });
    if (__syncthreads_or(twice)) {
      for (int s = threadIdx.x; s < group.keys; s += kPlaceThreads) {
        chosen[s] = 0;
      }
      __syncthreads();
      place_in_turns(ids, group, first, last, next, entries);
      continue;
    }
    const int32_t pairs_before = static_cast<int32_t>(first) * slots;
    group.for_each(ids, first, last, [&](int key, int query, int slot) {
      const int place = next[key] + __popc(chosen[key] & ((1u << query) - 1));
      entries(place) = pairs_before + query * slots + slot;
    });
    __syncthreads();
    for (int s = threadIdx.x; s < group.keys; s += kPlaceThreads) {
      next[s] += __popc(chosen[s]);
      chosen[s] = 0;
    }
    __syncthreads();
  }
}

}  // namespace

size_t invert_ids_workspace_bytes(const View<const int32_t>& ids_TK,
                                  int64_t keys) {
  if (ids_TK.elements() == 0 || keys == 0) return 0;
  return sizeof(int32_t) *
         static_cast<size_t>(invert_plan(ids_TK.size(0), keys).groups * keys);
}

void invert_ids(Launch l, View<const int32_t> ids_TK, View<int32_t> offsets_S1,
                View<int32_t> entries, std::byte* workspace) {
  const cudaStream_t stream = stream_of(l);
  const int64_t keys = offsets_S1.size(0) - 1, pairs = ids_TK.elements();
  const auto blocks = [](int64_t n, int threads) {
    return static_cast<unsigned>(ceil_div(n, threads));
  };
  const bool empty = pairs == 0 || keys == 0;
  if (workspace == nullptr || empty) {
    invert_zero_kernel<<<blocks(keys + 1, kTileThreads), kTileThreads, 0,
                         stream>>>(rows<1>(offsets_S1));
    check_launch("invert_ids");
  }
  if (empty) return;
  const Rows<const int32_t, 1> starts =
      rows<1>(View<const int32_t>(offsets_S1));
  if (workspace != nullptr) {
    auto* const counts = reinterpret_cast<int32_t*>(workspace);
    const InvertPlan plan = invert_plan(ids_TK.size(0), keys);
    const dim3 grid(static_cast<unsigned>(plan.groups),
                    static_cast<unsigned>(plan.pieces));
    const auto allow = [](auto kernel, int64_t bytes) {
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(bytes));
      return static_cast<size_t>(bytes);
    };
    invert_count_groups_kernel<<<
        grid, kPlaceThreads,
        allow(invert_count_groups_kernel, plan.count_bytes()), stream>>>(
        plan, rows<2>(ids_TK), keys, counts);
    check_launch("invert_ids");
    invert_prefix_groups_kernel<<<blocks(keys + 1, kPrefixThreads),
                                  kPrefixThreads, 0, stream>>>(
        plan.groups, counts, rows<1>(offsets_S1));
    check_launch("invert_ids");
    invert_scan_kernel<<<1, kScanThreads, 0, stream>>>(rows<1>(offsets_S1));
    check_launch("invert_ids");
    invert_place_groups_kernel<<<
        grid, kPlaceThreads,
        allow(invert_place_groups_kernel, plan.place_bytes()), stream>>>(
        plan, rows<2>(ids_TK), keys, counts, starts, rows<1>(entries));
    check_launch("invert_ids");
    return;
  }
  invert_count_kernel<<<blocks(pairs, kTileThreads), kTileThreads, 0, stream>>>(
      rows<2>(ids_TK), rows<1>(offsets_S1));
  check_launch("invert_ids");
  invert_scan_kernel<<<1, kScanThreads, 0, stream>>>(rows<1>(offsets_S1));
  check_launch("invert_ids");
  // About a block for each of an H200's processors: each reads all ids.
  const int64_t per_block =
      std::clamp<int64_t>(ceil_div(keys, 132), 32, kKeysPerBlock);
  invert_fill_kernel<<<static_cast<unsigned>(ceil_div(keys, per_block)),
                       kScanThreads, 0, stream>>>(
      rows<2>(ids_TK), starts, static_cast<int>(per_block), rows<1>(entries));
  check_launch("invert_ids");
}

}  // namespace tapeline::cuda
