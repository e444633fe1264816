// Rows walked in packs, sums over columns, and launches of clusters: what the
// memory-bound kernels share.
//
// A kernel names pack j of a row of n elements; `kWhole` says that every pack
// is full and aligned. If not, elements are read one by one and what lies
// beyond the row counts as 0. Arithmetic is the same either way, so the bits of
// a result depend on the shape and not on addresses, unless an op has another
// kernel for aligned rows (layer_norm.h, rms_norm.h).
#pragma once

#include <cooperative_groups.h>

#include <cstring>
#include <type_traits>

#include "kernels/cuda.cuh"

namespace tapeline::cuda {

template <bool kWhole, int kN, class T>
__device__ Pack<std::remove_const_t<T>, kN> load_pack(T* row, int64_t j,
                                                      int64_t n) {
  using V = Pack<std::remove_const_t<T>, kN>;
  if constexpr (kWhole) {
    return reinterpret_cast<const V*>(row)[j];
  } else {
    V out;
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      const int64_t i = j * kN + e;
      out.at[e] = i < n ? row[i] : std::remove_const_t<T>();
    }
    return out;
  }
}
template <bool kWhole, int kN, class T>
__device__ void store_pack(T* row, int64_t j, int64_t n, const Pack<T, kN>& v) {
  if constexpr (kWhole) {
    reinterpret_cast<Pack<T, kN>*>(row)[j] = v;
  } else {
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      const int64_t i = j * kN + e;
      if (i < n) row[i] = v.at[e];
    }
  }
}

// The same for what is used once: it is the first to leave the caches, in which
// what many threads share then stays.
template <bool kWhole, int kN, class T>
__device__ Pack<std::remove_const_t<T>, kN> load_pack_once(T* row, int64_t j,
                                                           int64_t n) {
  using V = Pack<std::remove_const_t<T>, kN>;
  if constexpr (kWhole && sizeof(V) == 16) {
    const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(row) + j);
    V out;
    memcpy(&out, &bits, sizeof(out));
    return out;
  } else {
    return load_pack<kWhole, kN>(row, j, n);
  }
}
template <bool kWhole, int kN, class T>
__device__ void store_pack_once(T* row, int64_t j, int64_t n,
                                const Pack<T, kN>& value) {
  if constexpr (kWhole && sizeof(value) == 16) {
    uint4 bits;
    memcpy(&bits, &value, sizeof(bits));
    __stcs(reinterpret_cast<uint4*>(row) + j, bits);
  } else {
    store_pack<kWhole>(row, j, n, value);
  }
}

// Calls f<true> or f<false>: whether all views can be walked in whole packs.
template <class F, class... T>
void by_alignment(F f, const View<T>&... x) {
  if ((packable(x) && ...)) {
    f.template operator()<true>();
  } else {
    f.template operator()<false>();
  }
}

// i / d and i % d for non-negative numbers, in 32 bits where they fit: a
// division in 64 takes longer than moving what it finds.
struct Division {
  int64_t quotient, rest;
};
__device__ inline Division divide(int64_t i, int64_t d) {
  if (((i | d) >> 32) == 0) {
    const uint32_t q = static_cast<uint32_t>(i) / static_cast<uint32_t>(d);
    return {q, static_cast<uint32_t>(i) - q * static_cast<uint32_t>(d)};
  }
  return {i / d, i % d};
}

// The sum over the kLanes threads that share a row, in every one of them: a
// part of a warp, or the whole block.
template <int kLanes, class A>
__device__ A row_sum(A value) {
  if constexpr (kLanes > kWarp) {
    return block_sum<kLanes>(value);
  } else {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      value += __shfl_xor_sync(~0u, value, step);
    }
    return value;
  }
}

// A kernel that walks each row with kLanes threads, each of which keeps up to
// kHeld packs in registers; 0: the row is too long and is read again instead.
// Rows of at most a warp share a block of 256 threads.
template <int kLanes_, int kHeld_>
struct RowPlan {
  static constexpr int kLanes = kLanes_, kHeld = kHeld_;
  static constexpr int kThreads = kLanes > kWarp ? kLanes : 256;
  static constexpr int kRows = kThreads / kLanes;
};
// f<RowPlan>() with the plan for rows of so many packs: two to four a thread,
// so that many rows are at work at once, some reading while others write.
template <class F>
void by_row_length(int64_t packs, F f) {
  if (packs <= 16) return f.template operator()<RowPlan<8, 2>>();
  if (packs <= 64) return f.template operator()<RowPlan<32, 2>>();
  if (packs <= 128) return f.template operator()<RowPlan<32, 4>>();
  if (packs <= 256) return f.template operator()<RowPlan<128, 2>>();
  if (packs <= 512) return f.template operator()<RowPlan<128, 4>>();
  if (packs <= 768) return f.template operator()<RowPlan<256, 3>>();
  if (packs <= 1024) return f.template operator()<RowPlan<256, 4>>();
  f.template operator()<RowPlan<256, 0>>();
}

// The packs of one row that belong to this thread: f(pack, slot) for each, in
// ascending order. The slot is a constant where packs are held.
template <class Plan, class F>
__device__ void for_each_pack(int64_t packs, F f) {
  const int lane = static_cast<int>(threadIdx.x) % Plan::kLanes;
  if constexpr (Plan::kHeld > 0) {
#pragma unroll
    for (int h = 0; h < Plan::kHeld; ++h) {
      const int64_t j = lane + h * Plan::kLanes;
      if (j < packs) f(j, h);
    }
  } else {
    for (int64_t j = lane; j < packs; j += Plan::kLanes) f(j, 0);
  }
}

// The packs of one row that belong to this thread, read once if the plan holds
// them, else on each use.
template <bool kWhole, class Plan, class T>
class RowReader {
 public:
  __device__ RowReader(const T* row, int64_t n, int64_t packs)
      : row_(row), n_(n) {
    if constexpr (Plan::kHeld > 0) {
      for_each_pack<Plan>(packs, [&](int64_t j, int h) { held_[h] = read(j); });
    }
  }
  __device__ Pack<T> operator()(int64_t j, int h) const {
    if constexpr (Plan::kHeld > 0) {
      return held_[h];
    } else {
      return read(j);
    }
  }

 private:
  __device__ Pack<T> read(int64_t j) const {
    return load_pack<kWhole, Pack<T>::kSize>(row_, j, n_);
  }
  const T* row_;
  int64_t n_;
  Pack<T> held_[Plan::kHeld > 0 ? Plan::kHeld : 1];
};

// Blocks of one cluster, which can read each other's shared memory: how a sum
// over many blocks ends without workspace. Eight is what every GPU grants.
constexpr unsigned kCluster = 8;

template <class... P>
void launch_clusters(const Launch& l, void (*kernel)(P...), dim3 blocks,
                     unsigned threads, size_t shared,
                     const std::type_identity_t<P>&... args) {
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream_of(l);
  config.attrs = &cluster;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, args...);  // check_launch() sees errors
}

// The sum of `value`, which is one of a block, over the blocks of a cluster in
// the order of their ranks; in every thread of all of them.
template <class A>
__device__ A cluster_sum(A value) {
  namespace cg = cooperative_groups;
  __shared__ A part;
  const cg::cluster_group cluster = cg::this_cluster();
  if (threadIdx.x == 0) part = value;
  cluster.sync();
  A total = 0;
  for (unsigned b = 0; b < kCluster; ++b) {
    total += *cluster.map_shared_rank(&part, b);
  }
  cluster.sync();  // nobody leaves, or writes again, before all is read
  return total;
}

// out[k][j] += sum over rows i of term k of element (i, j), for kSums terms at
// once. A cluster has the columns of kLanes packs; its blocks share the rows in
// turn, then groups of threads, then blocks add up in order: the order follows
// from the shape. `terms(sum, i, pack)` adds the terms of one pack.
template <class A, int kSums>
struct ColumnOutputs {
  Rows<A, 1> at[kSums];
};

template <int kThreads, int kLanes, int kN, int kSums, class A, class Terms>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    column_sums(int64_t rows, int64_t columns, Terms terms,
                ColumnOutputs<A, kSums> out) {
  namespace cg = cooperative_groups;
  constexpr int kGroups = kThreads / kLanes;
  constexpr int kColumns = kLanes * kN;
  __shared__ A parts[kGroups][kSums][kColumns];
  const cg::cluster_group cluster = cg::this_cluster();
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const int64_t first = int64_t{blockIdx.y} * kColumns;
  const int64_t pack = int64_t{blockIdx.y} * kLanes + lane;
  A sum[kSums][kN] = {};
  if (pack * kN < columns) {
#pragma unroll 4
    for (int64_t i = int64_t{cluster.block_rank()} * kGroups + group; i < rows;
         i += int64_t{kCluster} * kGroups) {
      terms(sum, i, pack);
    }
  }
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
#pragma unroll
    for (int e = 0; e < kN; ++e) parts[group][s][lane * kN + e] = sum[s][e];
  }
  __syncthreads();
  // Each thread has one column of one sum; the total replaces the first part.
  const int s = static_cast<int>(threadIdx.x) / kColumns;
  const int j = static_cast<int>(threadIdx.x) % kColumns;
  static_assert(kSums * kColumns <= kThreads);
  if (s < kSums) {
    A total = 0;
    for (int g = 0; g < kGroups; ++g) total += parts[g][s][j];
    parts[0][s][j] = total;
  }
  cluster.sync();
  if (cluster.block_rank() == 0 && s < kSums && first + j < columns) {
    A total = 0;
    for (unsigned b = 0; b < kCluster; ++b) {
      total += *cluster.map_shared_rank(&parts[0][s][j], b);
    }
    out.at[s](first + j) += total;
  }
  cluster.sync();  // nobody leaves before its sums are read
}

// As many clusters of 256 threads a block as an H200 can run at once: more
// would leave memory idle while a second, partly filled round of them runs.
constexpr int64_t kClustersAtOnce = 56;

template <int kN, int kSums, class A, class Terms>
void launch_column_sums(const Launch& l, int64_t rows, int64_t columns,
                        const Terms& terms,
                        const ColumnOutputs<A, kSums>& out) {
  if (rows == 0 || columns == 0) return;
  const auto tiles = [&](int lanes) { return ceil_div(columns, lanes * kN); };
  const auto run = [&]<int kThreads, int kLanes>() {
    launch_clusters(l, column_sums<kThreads, kLanes, kN, kSums, A, Terms>,
                    dim3(kCluster, static_cast<unsigned>(tiles(kLanes))),
                    kThreads, 0, rows, columns, terms, out);
  };
  // Rows are read in pieces of 32 to 256 bytes: the shortest that fill one
  // round. A narrow tensor has fewer clusters, which take more rows at once.
  if (tiles(4) <= 8) return run.template operator()<512, 2>();
  if (tiles(4) <= kClustersAtOnce / 2) return run.template operator()<512, 4>();
  if (tiles(4) <= kClustersAtOnce) return run.template operator()<256, 4>();
  if (tiles(8) <= kClustersAtOnce) return run.template operator()<256, 8>();
  run.template operator()<256, 16>();
}

}  // namespace tapeline::cuda
