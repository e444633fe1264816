#include "kernels/cuda_rows.cuh"
#include "kernels/embedding/embedding_cuda.h"
#include "kernels/embedding/embedding_rows.cuh"

namespace tapeline::cuda {
namespace {

constexpr int kForwardThreads = 128, kForwardPacks = 4;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

template <bool kWhole, class T>
__global__ void __launch_bounds__(kForwardThreads)
    embedding_forward_kernel(Rows<const int32_t, 1> ids, Rows<const T, 2> table,
                             Rows<T, 2> y) {
  constexpr int kN = Pack<T>::kSize;
  const int64_t t = blockIdx.x, d = y.size[1];
  const int64_t packs = (d + kN - 1) / kN;
  const T* from = table.row(ids(t));
  for (int64_t j = threadIdx.x; j < packs;
       j += kForwardThreads * kForwardPacks) {
    Pack<T> held[kForwardPacks];
#pragma unroll
    for (int h = 0; h < kForwardPacks; ++h) {
      const int64_t at = j + h * kForwardThreads;
      if (at < packs) held[h] = load_pack<kWhole, kN>(from, at, d);
    }
#pragma unroll
    for (int h = 0; h < kForwardPacks; ++h) {
      const int64_t at = j + h * kForwardThreads;
      if (at < packs) store_pack<kWhole>(y.row(t), at, d, held[h]);
    }
  }
}

// Adds dy of the listed tokens to a row of the table, in order.
template <bool kWhole, class T>
__device__ void add_rows(Rows<const T, 2> dy, const int32_t* token, int count,
                         Accumulator<T>* to) {
  using A = Accumulator<T>;
  constexpr int kN = Pack<T>::kSize;
  const int64_t d = dy.size[1], packs = (d + kN - 1) / kN;
  for (int64_t j = threadIdx.x; j < packs; j += kThreads) {
    Pack<A, kN> sum = load_pack<kWhole, kN>(to, j, d);
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const Pack<T> g = load_pack<kWhole, kN>(dy.row(token[i]), j, d);
#pragma unroll
      for (int e = 0; e < kN; ++e) sum.at[e] += load(g.at[e]);
    }
    store_pack<kWhole>(to, j, d, sum);
  }
}

// Without a workspace. One block a token. The first token of an id owns that
// row of the table: it looks for the later ones and adds all of them in order,
// so no two blocks meet and the order is that of the tokens. Looking reads the
// ids once per token, from the L2 cache; the rows are 1000 times more as long
// as a batch has fewer than a million tokens.
constexpr int kIdsEach = 4;
constexpr int kIdsAtOnce = kThreads * kIdsEach;

template <bool kWhole, class T>
__global__ void __launch_bounds__(kThreads)
    embedding_backward_kernel(Rows<const int32_t, 1> ids, Rows<const T, 2> dy,
                              Rows<Accumulator<T>, 2> dtable,
                              int64_t padding_id) {
  __shared__ int32_t found[kIdsAtOnce];
  __shared__ int counts[kWarps];
  const int64_t tokens = ids.size[0], t = blockIdx.x;
  const int32_t id = ids(t);
  if (id == padding_id) return;
  for (int64_t first = 0; first < t; first += kIdsAtOnce) {
    bool earlier = false;
#pragma unroll
    for (int e = 0; e < kIdsEach; ++e) {
      const int64_t i = first + e * kThreads + threadIdx.x;
      earlier |= i < t && ids(i) == id;
    }
    if (__syncthreads_or(earlier)) return;
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  for (int64_t first = t; first < tokens; first += kIdsAtOnce) {
    // A warp has neighbouring ids, so its finds precede those of the next.
    unsigned hits[kIdsEach];
    int mine = 0;
#pragma unroll
    for (int e = 0; e < kIdsEach; ++e) {
      const int64_t i = first + (int64_t{warp} * kIdsEach + e) * kWarp + lane;
      hits[e] = __ballot_sync(~0u, i < tokens && ids(i) == id);
      mine += __popc(hits[e]);
    }
    if (!__syncthreads_or(mine > 0)) continue;
    if (lane == 0) counts[warp] = mine;
    __syncthreads();
    int at = 0, count = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) at += counts[w];
      count += counts[w];
    }
#pragma unroll
    for (int e = 0; e < kIdsEach; ++e) {
      if (hits[e] >> lane & 1u) {
        found[at + __popc(hits[e] & ((1u << lane) - 1))] = static_cast<int32_t>(
            first + (int64_t{warp} * kIdsEach + e) * kWarp + lane);
      }
      at += __popc(hits[e]);
    }
    __syncthreads();
    add_rows<kWhole>(dy, found, count, dtable.row(id));
    __syncthreads();
  }
}

}  // namespace

template <class T>
void embedding_forward(Launch l, View<const int32_t> ids, View<const T> table,
                       View<T> y) {
  if (y.elements() == 0) return;
  const auto run = [&]<bool kWhole>() {
    embedding_forward_kernel<kWhole, T>
        <<<static_cast<unsigned>(ids.size(0)), kForwardThreads, 0,
           stream_of(l)>>>(rows<1>(ids), rows<2>(table), rows<2>(y));
  };
  by_alignment(run, table, View<const T>(y));
  check_launch("embedding_forward");
}

template <class T>
void embedding_backward(Launch l, View<const int32_t> ids, View<const T> dy,
                        View<Accumulator<T>> dtable, int64_t padding_id,
                        std::byte* workspace) {
  if (dy.elements() == 0) return;
  if (workspace != nullptr && ids.size(0) > kMostTokensUngrouped) {
    return embedding_backward_grouped<T>(l, ids, dy, dtable, padding_id,
                                         workspace);
  }
  const auto run = [&]<bool kWhole>() {
    embedding_backward_kernel<kWhole, T>
        <<<static_cast<unsigned>(ids.size(0)), kThreads, 0, stream_of(l)>>>(
            rows<1>(ids), rows<2>(dy), rows<2>(dtable), padding_id);
  };
  if (packable_onto(dy, dtable)) {
    run.template operator()<true>();
  } else {
    run.template operator()<false>();
  }
  check_launch("embedding_backward");
}

#define TAPELINE_EMBEDDING(T)                                                  \
  template void embedding_forward(Launch, View<const int32_t>, View<const T>,  \
                                  View<T>);                                    \
  template void embedding_backward(Launch, View<const int32_t>, View<const T>, \
                                   View<Accumulator<T>>, int64_t, std::byte*);
TAPELINE_EMBEDDING(float)
TAPELINE_EMBEDDING(bf16)
TAPELINE_EMBEDDING(double)
#undef TAPELINE_EMBEDDING

}  // namespace tapeline::cuda
