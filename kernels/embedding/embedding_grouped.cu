// Gradients of a table whose tokens are first linked by id.
//
// Every token goes to the front of its id's list, which costs two atomic
// operations on whole numbers; who then adds the rows of an id puts them in
// order: few of them by rank within a warp, many by looking through all tokens,
// a bit for each. So results do not depend on who came first.
#include <algorithm>

#include "kernels/cuda_launch.cuh"
#include "kernels/cuda_rows.cuh"
#include "kernels/embedding/embedding_cuda.h"
#include "kernels/embedding/embedding_rows.cuh"

namespace tapeline::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
// Threads of a block that has a token each: enough blocks for all processors.
constexpr int kLinkThreads = 128;
// Ids with more tokens than a warp has lanes are a block's, else a warp's.
constexpr int kFew = kWarp;

// The tokens of one id.
struct List {
  int32_t count;
  int32_t front;  // which came last; `next` leads to the others, then to -1
};

struct Workspace {
  List* list;      // [V] those of ids that occur
  int32_t* next;   // [T] token of the same id, in any order
  int32_t* many;   // [T / (kFew + 1)] ids of more than kFew tokens
  int32_t* total;  // of `many`
  size_t bytes;

  Workspace(std::byte* memory, int64_t tokens, int64_t vocabulary) : bytes(0) {
    const auto take = [&](int64_t size) {
      std::byte* const at = memory + bytes;
      bytes += static_cast<size_t>(ceil_div(size, 16) * 16);
      return at;
    };
    list = reinterpret_cast<List*>(
        take(vocabulary * static_cast<int64_t>(sizeof(List))));
    next = reinterpret_cast<int32_t*>(take(tokens * 4));
    many = reinterpret_cast<int32_t*>(take(tokens / (kFew + 1) * 4));
    total = reinterpret_cast<int32_t*>(take(4));
  }
};

// The id of this thread's token; padding_id where there is none.
__device__ int32_t id_of_thread(const Rows<const int32_t, 1>& ids,
                                int64_t padding_id, int64_t& t) {
  t = int64_t{blockIdx.x} * kLinkThreads + threadIdx.x;
  return t < ids.size[0] ? ids(t) : static_cast<int32_t>(padding_id);
}

__global__ void __launch_bounds__(kLinkThreads)
    embedding_clear_lists_kernel(Rows<const int32_t, 1> ids, int64_t padding_id,
                                 Workspace space) {
  wait_for_earlier();
  let_next_begin();
  int64_t t;
  const int32_t id = id_of_thread(ids, padding_id, t);
  if (t == 0) *space.total = 0;
  if (t < ids.size[0] && id != padding_id) space.list[id] = {0, -1};
}

__global__ void __launch_bounds__(kLinkThreads)
    embedding_link_tokens_kernel(Rows<const int32_t, 1> ids, int64_t padding_id,
                                 Workspace space) {
  // Older than embedding_clear_lists_kernel(), which has waited for it.
  int64_t t;
  const int32_t id = id_of_thread(ids, padding_id, t);
  wait_for_earlier();
  let_next_begin();
  if (t >= ids.size[0] || id == padding_id) return;
  List& list = space.list[id];
  const int32_t rank = atomicAdd(&list.count, 1);
  space.next[t] = atomicExch(&list.front, static_cast<int32_t>(t));
  if (rank == kFew) space.many[atomicAdd(space.total, 1)] = id;
}

// A warp has the row of the table that token `t` names, or 32 kHeld packs of
// it, if the token is the front of its list and the list is short.
constexpr int kHeld = 4;
template <bool kWhole, class T>
__device__ void add_few(int64_t t, int32_t id, int64_t part,
                        const Rows<const T, 2>& dy,
                        const Rows<Accumulator<T>, 2>& dtable,
                        const Workspace& space) {
  using A = Accumulator<T>;
  // A pack of sums, so that a warp's accesses to the table have no gaps.
  constexpr int kN = Pack<A>::kSize;
  __shared__ int32_t ordered[kWarps][kFew];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t d = dy.size[1], packs = (d + kN - 1) / kN;
  const List list = space.list[id];
  if (list.front != t || list.count > kFew) return;
  int32_t mine = 0x7fffffff, token = list.front;
  for (int i = 0; i < list.count; ++i) {
    if (i > 0) token = space.next[token];
    if (lane == i) mine = token;
  }
  int rank = 0;
  for (int i = 0; i < list.count; ++i) {
    rank += __shfl_sync(~0u, mine, i) < mine;
  }
  if (lane < list.count) ordered[warp][rank] = mine;
  __syncwarp();

  const int64_t first = part * (kWarp * kHeld) + lane;
  A* const to = dtable.row(id);
  Pack<A, kN> sum[kHeld];
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
    const int64_t j = first + h * kWarp;
    if (j < packs) sum[h] = load_pack<kWhole, kN>(to, j, d);
  }
  for (int i = 0; i < list.count; ++i) {
    const T* const from = dy.row(ordered[warp][i]);
    Pack<T, kN> g[kHeld];
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int64_t j = first + h * kWarp;
      if (j < packs) g[h] = load_pack<kWhole, kN>(from, j, d);
    }
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
#pragma unroll
      for (int e = 0; e < kN; ++e) sum[h].at[e] += load(g[h].at[e]);
    }
  }
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
    const int64_t j = first + h * kWarp;
    if (j < packs) store_pack<kWhole>(to, j, d, sum[h]);
  }
}

// Tokens that a block looks through at once, a word of bits each thread.
constexpr int kWindow = kThreads * 32;

// sum += the listed rows of dy, pack j of kN, in that order; kAtOnce rows are
// in flight together.
template <bool kWhole, int kAtOnce, int kN, class T>
__device__ void add_rows(const Rows<const T, 2>& dy, int64_t window,
                         const uint16_t* token, int count, int64_t j,
                         Pack<Accumulator<T>, kN>& sum) {
  int i = 0;
  const auto add = [&]<int kEach>() {
    for (; i + kEach <= count; i += kEach) {
      Pack<T, kN> g[kEach];
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
        g[r] =
            load_pack<kWhole, kN>(dy.row(window + token[i + r]), j, dy.size[1]);
      }
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
#pragma unroll
        for (int e = 0; e < kN; ++e) sum.at[e] += load(g[r].at[e]);
      }
    }
  };
  add.template operator()<kAtOnce>();
  add.template operator()<4>();
  add.template operator()<1>();
}

// Blocks have one id of many tokens after the other, each kThreads pairs of its
// columns.
template <bool kWhole, class T>
__device__ void add_many(const Rows<const int32_t, 1>& ids,
                         const Rows<const T, 2>& dy,
                         const Rows<Accumulator<T>, 2>& dtable,
                         const Workspace& space) {
  using A = Accumulator<T>;
  constexpr int kN = 2, kAtOnce = 128 / (kN * sizeof(T));
  __shared__ int32_t parts[kWarps];
  __shared__ uint16_t ordered[kWindow];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t tokens = dy.size[0];
  const int64_t d = dy.size[1], packs = (d + kN - 1) / kN;
  const int64_t chunks = (packs + kThreads - 1) / kThreads;
  const int64_t items = *space.total * chunks;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const Division at = divide(item, chunks);
    const int32_t id = space.many[at.quotient];
    const int64_t j = at.rest * kThreads + threadIdx.x;
    const bool inside = j < packs;
    A* const to = dtable.row(id);
    Pack<A, kN> sum{};
    if (inside) sum = load_pack<kWhole, kN>(to, j, d);
    for (int64_t window = 0; window < tokens; window += kWindow) {
      unsigned bits = 0;
#pragma unroll 16
      for (int word = 0; word < kWarp; ++word) {
        const int64_t t = window + (warp * kWarp + word) * kWarp + lane;
        const unsigned found = __ballot_sync(~0u, t < tokens && ids(t) == id);
        if (lane == word) bits = found;
      }
      int place = __popc(bits);
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) {
        const int other = __shfl_up_sync(~0u, place, step);
        if (lane >= step) place += other;
      }
      __syncthreads();  // of a window before this one
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
    embedding_add_kernel(Rows<const int32_t, 1> ids, int64_t padding_id,
                         int64_t parts, Rows<const T, 2> dy,
                         Rows<Accumulator<T>, 2> dtable, Workspace space) {
  const Division at =
      divide(int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp, parts);
  const int64_t t = dy.size[0] - 1 - at.quotient;
  const int32_t id = t >= 0 ? ids(t) : 0;
  wait_for_earlier();
  // The longest sums begin first; for the same reason the last tokens, which
  // are more often the front of a long list.
  add_many<kWhole>(ids, dy, dtable, space);
  if (t >= 0 && id != padding_id) {
    add_few<kWhole>(t, id, at.rest, dy, dtable, space);
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
  const int64_t tokens = ids.size(0);
  const Workspace space(workspace, tokens, dtable.size(0));
  const auto blocks = [](int64_t n, int each) {
    return dim3(static_cast<unsigned>(ceil_div(n, each)));
  };
  launch_early(l, embedding_clear_lists_kernel, blocks(tokens, kLinkThreads),
               kLinkThreads, 0, 1, rows<1>(ids), padding_id, space);
  launch_early(l, embedding_link_tokens_kernel, blocks(tokens, kLinkThreads),
               kLinkThreads, 0, 1, rows<1>(ids), padding_id, space);
  const int64_t parts = ceil_div(
      ceil_div(dy.size(1), Pack<Accumulator<T>>::kSize), kWarp * kHeld);
  const auto run = [&]<bool kWhole>() {
    launch_early(l, embedding_add_kernel<kWhole, T>,
                 blocks(tokens * parts, kWarps), kThreads, 0, 1, rows<1>(ids),
                 padding_id, parts, rows<2>(dy), rows<2>(dtable), space);
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
