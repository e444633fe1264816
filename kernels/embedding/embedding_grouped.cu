// Gradients of a table whose tokens are first gathered by id.
//
// Tokens of an id come together in no particular order, which costs an atomic
// addition of whole numbers each; who then adds their rows puts them in order:
// few of them by rank within a warp, many by a set of bits per window of
// tokens. So results do not depend on who came first.
#include <algorithm>

#include "kernels/cuda_rows.cuh"
#include "kernels/embedding/embedding_cuda.h"
#include "kernels/embedding/embedding_rows.cuh"

namespace tapeline::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
// Ids with more tokens than a warp has lanes are a block's, else a warp's.
constexpr int kFew = kWarp;

// How many there are of what the passes below append; before that, 0.
struct Totals {
  int32_t places;  // tokens that count
  int32_t few, many;
};

// An id that occurs, and where its tokens stand in `token`.
struct Segment {
  int32_t id, begin, count;
};

struct Workspace {
  Totals* totals;
  int32_t* count;    // [V] tokens of each id, then where they begin
  int32_t* rank;     // [T] of a token among those of its id, in any order
  int32_t* token;    // [T] by id
  Segment* segment;  // [min(T, V)] those of few from the front, others behind
  int64_t segments;
  size_t bytes;

  Workspace(std::byte* memory, int64_t tokens, int64_t vocabulary)
      : segments(std::min(tokens, vocabulary)), bytes(0) {
    const auto take = [&](int64_t size) {
      std::byte* const at = memory + bytes;
      bytes += static_cast<size_t>(ceil_div(size, 16) * 16);
      return at;
    };
    totals = reinterpret_cast<Totals*>(take(sizeof(Totals)));
    count = reinterpret_cast<int32_t*>(take(vocabulary * 4));
    rank = reinterpret_cast<int32_t*>(take(tokens * 4));
    token = reinterpret_cast<int32_t*>(take(tokens * 4));
    segment = reinterpret_cast<Segment*>(
        take(segments * static_cast<int64_t>(sizeof(Segment))));
  }
};

__global__ void __launch_bounds__(kThreads)
    count_ids(Rows<const int32_t, 1> ids, int64_t padding_id, Workspace space) {
  const int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t >= ids.size[0]) return;
  const int32_t id = ids(t);
  if (id != padding_id) space.rank[t] = atomicAdd(&space.count[id], 1);
}

// The value's sum over the threads before this one, beginning where all that
// the block appends begins.
__device__ int32_t append(int32_t value, int32_t* total) {
  __shared__ int32_t parts[kWarps];
  __shared__ int32_t first;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  int32_t sum = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int32_t other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();  // of a call before this one
  if (lane == kWarp - 1) parts[warp] = sum;
  __syncthreads();
  int32_t before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp ? parts[w] : 0;
    all += parts[w];
  }
  if (threadIdx.x == 0) first = atomicAdd(total, all);
  __syncthreads();
  return first + before + sum - value;
}

__global__ void __launch_bounds__(kThreads)
    make_segments(int64_t vocabulary, Workspace space) {
  const int64_t id = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int32_t count = id < vocabulary ? space.count[id] : 0;
  const int32_t begin = append(count, &space.totals->places);
  const bool few = count > 0 && count <= kFew, many = count > kFew;
  const int32_t of_few = append(few, &space.totals->few);
  const int32_t of_many = append(many, &space.totals->many);
  if (count == 0) return;
  space.count[id] = begin;
  space.segment[few ? of_few : space.segments - 1 - of_many] = {
      static_cast<int32_t>(id), begin, count};
}

__global__ void __launch_bounds__(kThreads)
    gather(Rows<const int32_t, 1> ids, int64_t padding_id, Workspace space) {
  const int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t >= ids.size[0]) return;
  const int32_t id = ids(t);
  if (id == padding_id) return;
  space.token[space.count[id] + space.rank[t]] = static_cast<int32_t>(t);
}

// sum += rows first[0], first[1], ... of dy, pack j of kN, in that order;
// kAtOnce rows are in flight together.
template <bool kWhole, int kAtOnce, int kN, class T, class Index>
__device__ void add_rows(const Rows<const T, 2>& dy, int64_t base,
                         const Index* token, int count, int64_t j,
                         Pack<Accumulator<T>, kN>& sum) {
  int i = 0;
  const auto add = [&]<int kEach>() {
    for (; i + kEach <= count; i += kEach) {
      Pack<T, kN> g[kEach];
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
        g[r] =
            load_pack<kWhole, kN>(dy.row(base + token[i + r]), j, dy.size[1]);
      }
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
#pragma unroll
        for (int e = 0; e < kN; ++e) sum.at[e] += load(g[r].at[e]);
      }
    }
  };
  if constexpr (kAtOnce > 4) add.template operator()<kAtOnce>();
  add.template operator()<4>();
  add.template operator()<1>();
}

// A warp has one id's row of the table, or 32 packs of it.
template <bool kWhole, class T>
__device__ void add_few(int64_t item, const Rows<const T, 2>& dy,
                        const Rows<Accumulator<T>, 2>& dtable,
                        const Workspace& space) {
  using A = Accumulator<T>;
  constexpr int kN = Pack<T>::kSize;
  __shared__ int32_t ordered[kWarps][kFew];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t d = dy.size[1], packs = (d + kN - 1) / kN;
  const Division at = divide(item, (packs + kWarp - 1) / kWarp);
  if (at.quotient >= space.totals->few) return;
  const Segment segment = space.segment[at.quotient];
  const int32_t mine =
      lane < segment.count ? space.token[segment.begin + lane] : 0x7fffffff;
  int rank = 0;
  for (int i = 0; i < segment.count; ++i) {
    rank += __shfl_sync(~0u, mine, i) < mine;
  }
  if (lane < segment.count) ordered[warp][rank] = mine;
  __syncwarp();
  const int64_t j = at.rest * kWarp + lane;
  if (j >= packs) return;
  A* const to = dtable.row(segment.id);
  Pack<A, kN> sum = load_pack<kWhole, kN>(to, j, d);
  add_rows<kWhole, 4>(dy, 0, ordered[warp], segment.count, j, sum);
  store_pack<kWhole>(to, j, d, sum);
}

// Tokens whose set of bits a block holds, one word a thread.
constexpr int kWindow = kThreads * 32;

// Blocks have one id after the other, each kThreads pairs of its columns.
template <bool kWhole, class T>
__device__ void add_many(int64_t blocks, const Rows<const T, 2>& dy,
                         const Rows<Accumulator<T>, 2>& dtable,
                         const Workspace& space) {
  using A = Accumulator<T>;
  constexpr int kN = 2, kAtOnce = 128 / (kN * sizeof(T));
  __shared__ unsigned chosen[kThreads];
  __shared__ int32_t parts[kWarps];
  __shared__ uint16_t ordered[kWindow];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t d = dy.size[1], packs = (d + kN - 1) / kN;
  const int64_t chunks = (packs + kThreads - 1) / kThreads;
  const int64_t items = space.totals->many * chunks;
  for (int64_t item = blockIdx.x; item < items; item += blocks) {
    const Division at = divide(item, chunks);
    const Segment segment = space.segment[space.segments - 1 - at.quotient];
    const int64_t j = at.rest * kThreads + threadIdx.x;
    const bool inside = j < packs;
    A* const to = dtable.row(segment.id);
    Pack<A, kN> sum{};
    if (inside) sum = load_pack<kWhole, kN>(to, j, d);
    for (int64_t window = 0; window < dy.size[0]; window += kWindow) {
      chosen[threadIdx.x] = 0;
      __syncthreads();
      for (int i = threadIdx.x; i < segment.count; i += kThreads) {
        const int64_t t = space.token[segment.begin + i] - window;
        if (t >= 0 && t < kWindow) {
          atomicOr(&chosen[t / 32], 1u << static_cast<unsigned>(t % 32));
        }
      }
      __syncthreads();
      unsigned bits = chosen[threadIdx.x];
      int place = __popc(bits);
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) {
        const int other = __shfl_up_sync(~0u, place, step);
        if (lane >= step) place += other;
      }
      if (lane == kWarp - 1) parts[warp] = place;
      __syncthreads();
      int count = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        place += w < warp ? parts[w] : 0;
        count += parts[w];
      }
      place -= __popc(bits);
      for (; bits != 0; bits &= bits - 1) {
        ordered[place++] =
            static_cast<uint16_t>(threadIdx.x * 32 + __ffs(bits) - 1);
      }
      __syncthreads();
      if (inside) {
        add_rows<kWhole, kAtOnce>(dy, window, ordered, count, j, sum);
      }
    }
    if (inside) store_pack<kWhole>(to, j, d, sum);
  }
}

template <bool kWhole, class T>
__global__ void __launch_bounds__(kThreads, 4)
    add(int64_t blocks_of_many, Rows<const T, 2> dy,
        Rows<Accumulator<T>, 2> dtable, Workspace space) {
  // The longest sums begin first.
  if (blockIdx.x < blocks_of_many) {
    add_many<kWhole>(blocks_of_many, dy, dtable, space);
  } else {
    const int64_t block = blockIdx.x - blocks_of_many;
    add_few<kWhole>(block * kWarps + threadIdx.x / kWarp, dy, dtable, space);
  }
}

}  // namespace

size_t embedding_grouped_bytes(int64_t tokens, int64_t vocabulary) {
  return Workspace(nullptr, tokens, vocabulary).bytes;
}

template <class T>
void embedding_backward_grouped(Launch l, View<const int32_t> ids,
                                View<const T> dy, View<Accumulator<T>> dtable,
                                int64_t padding_id, std::byte* workspace) {
  const int64_t tokens = ids.size(0), vocabulary = dtable.size(0);
  const Workspace space(workspace, tokens, vocabulary);
  const cudaStream_t stream = stream_of(l);
  const auto blocks = [](int64_t n, int each) {
    return static_cast<unsigned>(ceil_div(n, each));
  };
  cudaMemsetAsync(
      space.totals, 0,
      static_cast<size_t>(reinterpret_cast<std::byte*>(space.rank) - workspace),
      stream);
  count_ids<<<blocks(tokens, kThreads), kThreads, 0, stream>>>(
      rows<1>(ids), padding_id, space);
  make_segments<<<blocks(vocabulary, kThreads), kThreads, 0, stream>>>(
      vocabulary, space);
  gather<<<blocks(tokens, kThreads), kThreads, 0, stream>>>(rows<1>(ids),
                                                            padding_id, space);
  check_launch("embedding_backward");
  // As many blocks as could be needed, of those with many tokens up to eight on
  // each of an H200's processors; those without work end at once.
  constexpr int kN = Pack<T>::kSize;
  const int64_t d = dy.size(1);
  const int64_t many = std::min<int64_t>(
      tokens / (kFew + 1) * ceil_div(d, 2 * kThreads), 8 * 132);
  const int64_t few =
      ceil_div(space.segments * ceil_div(ceil_div(d, kN), kWarp), kWarps);
  const auto run = [&]<bool kWhole>() {
    add<kWhole, T><<<static_cast<unsigned>(many + few), kThreads, 0, stream>>>(
        many, rows<2>(dy), rows<2>(dtable), space);
  };
  if (packable_onto(dy, dtable)) {
    run.template operator()<true>();
  } else {
    run.template operator()<false>();
  }
  check_launch("embedding_backward");
}

#define TAPELINE_EMBEDDING_GROUPED(T)                                   \
  template void embedding_backward_grouped(                             \
      Launch, View<const int32_t>, View<const T>, View<Accumulator<T>>, \
      int64_t, std::byte*);
TAPELINE_EMBEDDING_GROUPED(float)
TAPELINE_EMBEDDING_GROUPED(bf16)
TAPELINE_EMBEDDING_GROUPED(double)
#undef TAPELINE_EMBEDDING_GROUPED

}  // namespace tapeline::cuda
