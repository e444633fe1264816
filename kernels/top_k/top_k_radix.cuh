// Radix select of one row by one block: private to top_k_radix.cu and to what
// times its variants.
//
// 1. A sample of the row gives a bound that about 1.5 k scores reach.
// 2. One pass over the row collects those in shared memory.
// 3. Radix passes over them find the k-th key; chosen ids set bits in a bitmap
//    of the row, which is written out in ascending order.
//
// Where the bound was wrong (fewer than k reach it, or more than fit), the
// radix passes walk the row itself: slower, but no case is lost. Candidates are
// collected in any order; what is done with them does not depend on it.
#pragma once

#include <cstdint>

#include "kernels/cuda.cuh"
#include "kernels/top_k/top_k_fast.h"

namespace tapeline::cuda::top_k_radix_detail {

// Larger keys are larger scores: 0 for -inf, which is no candidate, 1 for NaN,
// and from kLowest on for numbers, where -0 equals 0.
constexpr uint32_t kLowest = 0x00800000;
__device__ inline uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 + 0 is 0
  const uint32_t key = bits ^ (bits >> 31 != 0 ? ~0u : 0x80000000u);
  if (x != x) return 1;
  return key < kLowest ? 0 : key;
}
// The score whose key this is, for keys of numbers.
__device__ inline float score_of(uint32_t key) {
  return __uint_as_float(key ^ (key >> 31 != 0 ? 0x80000000u : ~0u));
}

// Keys above `threshold` are taken, and of those equal to it the `ties` with
// the lowest ids, of `equal`.
struct Cut {
  uint32_t threshold;
  int ties, equal;
};

template <int kThreads>
struct Block {
  static constexpr int kWarps = kThreads / kWarp;
  static constexpr int kBinsPerThread = kTopKBins / kThreads;

  struct Small {
    int warp[kWarps];
    int bin, above, in_bin;
    int count;
    int last;
  };

  uint32_t* key;     // [capacity]
  int32_t* id;       // [capacity]
  int* histogram;    // [kTopKBins]
  uint32_t* bitmap;  // a bit a key from `base` on
  Small& small;
  int tid = static_cast<int>(threadIdx.x);
  int lane = tid % kWarp, warp = tid / kWarp;

  // The sum of `value` of all threads before this one.
  __device__ int exclusive_sum(int value, int* total) {
    int sum = value;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int below = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += below;
    }
    __syncthreads();  // of a call before this one
    if (lane == kWarp - 1) small.warp[warp] = sum;
    __syncthreads();
    int before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int part = small.warp[w];
      if (w < warp) before += part;
      all += part;
    }
    *total = all;
    return before + sum - value;
  }

  // small.bin is the bin that holds the rank-th largest (from 1),
  // small.above what lies in larger bins. The histogram is complete.
  __device__ void find_bin(int rank) {
    int count[kBinsPerThread], sum = 0, total;
    const int top = kTopKBins - 1 - tid * kBinsPerThread;
#pragma unroll
    for (int b = 0; b < kBinsPerThread; ++b) {
      count[b] = histogram[top - b];
      sum += count[b];
    }
    int above = exclusive_sum(sum, &total);
    if (above < rank && rank <= above + sum) {
#pragma unroll
      for (int b = 0; b < kBinsPerThread; ++b) {
        if (above < rank && rank <= above + count[b]) {
          small.bin = top - b;
          small.above = above;
          small.in_bin = count[b];
        }
        above += count[b];
      }
    }
    __syncthreads();
  }

  // The cut that takes `rank` of the keys that for_each(f) calls f(key) with,
  // of which there are at least that many; exact after 3 levels, its low 10
  // bits zero after 2.
  template <int kLevels, class ForEach>
  __device__ Cut select(int rank, ForEach for_each) {
    constexpr int kShift[3] = {21, 10, 0};
    uint32_t prefix = 0, mask = 0;
    int in_bin = 0;
#pragma unroll 1
    for (int level = 0; level < kLevels; ++level) {
      const int shift = kShift[level];
      const uint32_t bins = level < 2 ? 2048 : 1024;
      for (int b = tid; b < kTopKBins; b += kThreads) histogram[b] = 0;
      __syncthreads();
      for_each([&](uint32_t k) {
        if ((k & mask) == prefix) {
          atomicAdd(&histogram[(k >> shift) & (bins - 1)], 1);
        }
      });
      __syncthreads();
      find_bin(rank);
      rank -= small.above;
      in_bin = small.in_bin;
      prefix |= static_cast<uint32_t>(small.bin) << shift;
      mask |= (bins - 1) << shift;
      // The whole bin is taken: finer levels would only say so again.
      if (kLevels == 3 && in_bin == rank) break;
    }
    if (kLevels == 3 && in_bin == rank) return {prefix - 1, 0, 0};
    return {prefix, rank, in_bin};
  }

  __device__ void clear(int words) {
    for (int w = tid; w < words; w += kThreads) bitmap[w] = 0;
    __syncthreads();
  }

  // Words of the bitmap that this thread owns.
  __device__ void owned(int words, int* first, int* last) const {
    const int each = (words + kThreads - 1) / kThreads;
    *first = min(words, tid * each);
    *last = min(words, *first + each);
  }

  // The place of the n-th (from 1) bit that is set; there are as many.
  __device__ int place_of_bit(int n, int words) {
    int first, last, total, count = 0;
    owned(words, &first, &last);
    for (int w = first; w < last; ++w) count += __popc(bitmap[w]);
    int before = exclusive_sum(count, &total);
    if (before < n && n <= before + count) {
      for (int w = first; w < last; ++w) {
        for (uint32_t bits = bitmap[w]; bits != 0; bits &= bits - 1) {
          if (++before == n) small.last = w * 32 + __ffs(bits) - 1;
        }
      }
    }
    __syncthreads();
    return small.last;
  }

  // Writes the places of all bits in order, then -1.
  __device__ void write_ids(int base, int words, int k, int32_t* out) {
    int first, last, total, count = 0;
    owned(words, &first, &last);
    for (int w = first; w < last; ++w) count += __popc(bitmap[w]);
    int next = exclusive_sum(count, &total);
    for (int w = first; w < last; ++w) {
      for (uint32_t bits = bitmap[w]; bits != 0; bits &= bits - 1) {
        if (next < k) out[next] = base + w * 32 + __ffs(bits) - 1;
        ++next;
      }
    }
    for (int j = total + tid; j < k; j += kThreads) out[j] = -1;
  }
};

// Scores [begin, end) of a row: packs of 4 from the first that is aligned on,
// and up to 3 at either side.
struct RowOfScores {
  const float* scores;
  int begin, end;
  int first_pack, last_pack;  // packs p hold scores 4 p .. 4 p + 3

  __device__ int packs() const { return last_pack - first_pack; }
};

template <int kThreads, int kBlocks, bool kSample = true>
__global__ void __launch_bounds__(kThreads, kBlocks)
    select_rows(const float* __restrict__ scores, int64_t stride, int keys,
                bool aligned, Rows<const int32_t, 1> range_begin,
                Rows<const int32_t, 1> range_end, int k, int capacity,
                int32_t* __restrict__ ids, int64_t ids_stride) {
  using B = Block<kThreads>;
  extern __shared__ uint32_t shared[];
  __shared__ typename B::Small small;
  B block{shared, reinterpret_cast<int32_t*>(shared + capacity),
          reinterpret_cast<int*>(shared + 2 * capacity),
          shared + 2 * capacity + kTopKBins, small};
  const int tid = block.tid, lane = block.lane;
  const int64_t n = blockIdx.x;
  int32_t* out = ids + n * ids_stride;

  RowOfScores row{scores + n * stride, 0, keys, 0, 0};
  if (range_begin.data != nullptr) {
    row.begin = range_begin(n);
    row.end = range_end(n);
    if (row.begin >= row.end) row.begin = row.end = 0;
  }
  const int size = row.end - row.begin;
  if (aligned) {
    row.first_pack = (row.begin + 3) / 4;
    row.last_pack = max(row.first_pack, row.end / 4);
  } else {
    row.first_pack = row.last_pack = row.end / 4 + 1;
  }
  // Scores in front of the packs, and behind them, in one count.
  const int head = min(row.end, row.first_pack * 4) - row.begin;
  const int tail_at = max(row.last_pack * 4, row.begin + head);
  const int loose = head + max(0, row.end - tail_at);
  const auto loose_id = [&](int i) {
    return i < head ? row.begin + i : tail_at + i - head;
  };
  const float4* packs = reinterpret_cast<const float4*>(row.scores);

  const auto each_key = [&](auto f) {
    for (int i = tid; i < loose; i += kThreads) {
      f(key_of(row.scores[loose_id(i)]), loose_id(i));
    }
    for (int p = row.first_pack + tid; p < row.last_pack; p += kThreads) {
      const float4 v = packs[p];
      f(key_of(v.x), p * 4);
      f(key_of(v.y), p * 4 + 1);
      f(key_of(v.z), p * 4 + 2);
      f(key_of(v.w), p * 4 + 3);
    }
  };

  const int base = row.begin / 32 * 32;
  const int words = (row.end - base + 31) / 32;
  if (tid == 0) small.count = 0;
  block.clear(words);

  // The bound: without one, every candidate reaches it.
  bool listed = size <= capacity;
  float bound = -INFINITY;
  if constexpr (kSample) {
    if (!listed && size > k && row.packs() >= 1024) {
      // 4096 samples of a row of 2^17, in that ratio for longer ones.
      const int sampled = min(row.packs(), 1024 * ((size >> 17) + 1));
      const float expected = static_cast<float>(k) *
                             static_cast<float>(sampled * 4) /
                             static_cast<float>(size);
      // Six deviations of a binomial count, and some for small ones.
      const int rank = static_cast<int>(expected + 6 * sqrtf(expected) + 8);
      if (rank < sampled * 4) {
        const Cut cut = block.template select<2>(rank, [&](auto f) {
          for (int i = tid; i < sampled; i += kThreads) {
            const int p = static_cast<int>(static_cast<int64_t>(i) *
                                           row.packs() / sampled);
            const float4 v = packs[row.first_pack + p];
            f(key_of(v.x));
            f(key_of(v.y));
            f(key_of(v.z));
            f(key_of(v.w));
          }
        });
        if (cut.threshold > kLowest) {
          listed = true;
          bound = score_of(cut.threshold);
        }
      }
    }
  }

  if (listed) {
    const bool all = size <= capacity;
    const auto take = [&](int at, float x, int id) {
      if (at < capacity) {
        block.key[at] = key_of(x);
        block.id[at] = id;
      }
    };
    const auto reaches = [&](float x) {
      return all ? x != -INFINITY : x >= bound;
    };
    for (int i = tid; i < loose; i += kThreads) {
      const float x = row.scores[loose_id(i)];
      if (reaches(x)) take(atomicAdd(&small.count, 1), x, loose_id(i));
    }
    constexpr int kUnroll = 4;
    for (int p = row.first_pack; p < row.last_pack; p += kThreads * kUnroll) {
      float4 v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = p + u * kThreads + tid;
        v[u] = at < row.last_pack
                   ? __ldcs(packs + at)
                   : float4{-INFINITY, -INFINITY, -INFINITY, -INFINITY};
      }
      uint32_t mine = 0;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        mine |= (reaches(v[u].x) ? 1u : 0u) << (u * 4);
        mine |= (reaches(v[u].y) ? 2u : 0u) << (u * 4);
        mine |= (reaches(v[u].z) ? 4u : 0u) << (u * 4);
        mine |= (reaches(v[u].w) ? 8u : 0u) << (u * 4);
      }
      if (__all_sync(~0u, mine == 0)) continue;
      // One reservation for the warp.
      int before = __popc(mine);
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) {
        const int below = __shfl_up_sync(~0u, before, step);
        if (lane >= step) before += below;
      }
      int start = 0;
      if (lane == kWarp - 1) start = atomicAdd(&small.count, before);
      int at = __shfl_sync(~0u, start, kWarp - 1) + before - __popc(mine);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int id = (p + u * kThreads + tid) * 4;
        if (mine >> (u * 4) & 1) take(at++, v[u].x, id);
        if (mine >> (u * 4) & 2) take(at++, v[u].y, id + 1);
        if (mine >> (u * 4) & 4) take(at++, v[u].z, id + 2);
        if (mine >> (u * 4) & 8) take(at++, v[u].w, id + 3);
      }
    }
    __syncthreads();
    // Too few or too many: the row itself decides.
    if (!all && (small.count < k || small.count > capacity)) listed = false;
  }

  const auto each_candidate = [&](auto f) {
    if (listed) {
      const int count = small.count;
      for (int i = tid; i < count; i += kThreads) f(block.key[i], block.id[i]);
    } else {
      each_key(f);
    }
  };
  Cut cut{0, 0, 0};
  const int available = listed ? small.count : size;
  if (available > k && k > 0) {
    cut = block.template select<3>(
        k, [&](auto f) { each_candidate([&](uint32_t key, int) { f(key); }); });
    // Fewer than k candidates: -inf stays out.
    if (cut.threshold == 0) cut.ties = 0;
  } else if (k == 0) {
    cut.threshold = ~0u;
  }
  const auto mark = [&](auto chosen) {
    each_candidate([&](uint32_t key, int id) {
      if (chosen(key, id)) {
        const int bit = id - base;
        atomicOr(&block.bitmap[bit / 32], 1u << (bit % 32));
      }
    });
    __syncthreads();
  };
  int last_tie = -1;
  if (cut.ties > 0) {
    mark([&](uint32_t key, int) { return key == cut.threshold; });
    last_tie = base + block.place_of_bit(cut.ties, words);
    block.clear(words);
  }
  mark([&](uint32_t key, int id) {
    return key > cut.threshold || (key == cut.threshold && id <= last_tie);
  });
  block.write_ids(base, words, k, out);
}

}  // namespace tapeline::cuda::top_k_radix_detail
