#include "kernels/combine/combine_cuda.h"
#include "kernels/cuda_rows.cuh"

namespace tapeline::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kSlots = 8;  // rows that a thread reads at a time
constexpr int kWarps = kThreads / kWarp;

// One block a token; up to kSlots rows are read at a time and added in
// ascending order of slots.
template <bool kWhole, class T>
__global__ void __launch_bounds__(kThreads)
    combine_forward_kernel(Rows<const T, 2> x,
                           Rows<const Accumulator<T>, 2> weight,
                           Rows<const int32_t, 2> row, Rows<T, 2> y) {
  using A = Accumulator<T>;
  constexpr int kN = Pack<T>::kSize;
  const int64_t t = blockIdx.x, width = y.size[1], top_k = row.size[1];
  const int64_t packs = (width + kN - 1) / kN;
  for (int64_t j = threadIdx.x; j < packs; j += kThreads) {
    A sum[kN] = {};
    for (int64_t k0 = 0; k0 < top_k; k0 += kSlots) {
      Pack<T> from[kSlots];
      bool routed[kSlots];
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const int32_t r = k0 + s < top_k ? row(t, k0 + s) : -1;
        routed[s] = r >= 0;
        if (r >= 0) from[s] = load_pack<kWhole, kN>(x.row(r), j, width);
      }
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        if (!routed[s]) continue;
        const A w = weight(t, k0 + s);
#pragma unroll
        for (int e = 0; e < kN; ++e) {
          sum[e] = fma(w, A(load(from[s].at[e])), sum[e]);
        }
      }
    }
    Pack<T> out;
#pragma unroll
    for (int e = 0; e < kN; ++e) store(out.at[e], sum[e]);
    store_pack<kWhole>(y.row(t), j, width, out);
  }
}

// One block a token: dy's pack is read once, and meets kSlots rows of x at a
// time. Dot products end in a fixed tree over the block.
template <bool kWhole, class T>
__global__ void __launch_bounds__(kThreads)
    combine_backward_kernel(Rows<const T, 2> dy, Rows<const T, 2> x,
                            Rows<const Accumulator<T>, 2> weight,
                            Rows<const int32_t, 2> row, Rows<T, 2> dx,
                            Rows<Accumulator<T>, 2> dweight) {
  using A = Accumulator<T>;
  constexpr int kN = Pack<T>::kSize;
  __shared__ A parts[kSlots][kWarps];
  const int64_t t = blockIdx.x, width = dy.size[1], top_k = row.size[1];
  const int64_t packs = (width + kN - 1) / kN;
  for (int64_t k0 = 0; k0 < top_k; k0 += kSlots) {
    A dot[kSlots] = {};
    for (int64_t j = threadIdx.x; j < packs; j += kThreads) {
      const Pack<T> g = load_pack<kWhole, kN>(dy.row(t), j, width);
      Pack<T> from[kSlots];
      int32_t r[kSlots];
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        r[s] = k0 + s < top_k ? row(t, k0 + s) : -1;
        if (r[s] >= 0) from[s] = load_pack<kWhole, kN>(x.row(r[s]), j, width);
      }
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        if (r[s] < 0) continue;
        const A w = weight(t, k0 + s);
        Pack<T> out;
#pragma unroll
        for (int e = 0; e < kN; ++e) {
          const A gradient = load(g.at[e]);
          dot[s] += gradient * load(from[s].at[e]);
          store(out.at[e], w * gradient);
        }
        store_pack<kWhole>(dx.row(r[s]), j, width, out);
      }
    }
    __syncthreads();  // of the slots before
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const A sum = warp_sum(dot[s]);
      if (threadIdx.x % kWarp == 0) parts[s][threadIdx.x / kWarp] = sum;
    }
    __syncthreads();
    const int s = static_cast<int>(threadIdx.x);
    if (s < kSlots && k0 + s < top_k) {
      A sum = 0;
      for (int w = 0; w < kWarps; ++w) sum += parts[s][w];
      dweight(t, k0 + s) = sum;
    }
  }
}

}  // namespace

template <class T>
void combine_forward(Launch l, View<const T> x,
                     View<const Accumulator<T>> weight, View<const int32_t> row,
                     View<T> y) {
  if (y.elements() == 0) return;
  const auto run = [&]<bool kWhole>() {
    combine_forward_kernel<kWhole, T>
        <<<static_cast<unsigned>(y.size(0)), kThreads, 0, stream_of(l)>>>(
            rows<2>(x), rows<2>(weight), rows<2>(row), rows<2>(y));
  };
  by_alignment(run, x, View<const T>(y));
  check_launch("combine_forward");
}

template <class T>
void combine_backward(Launch l, View<const T> dy, View<const T> x,
                      View<const Accumulator<T>> weight,
                      View<const int32_t> row, View<T> dx,
                      View<Accumulator<T>> dweight) {
  if (dy.size(0) == 0) return;
  const auto run = [&]<bool kWhole>() {
    combine_backward_kernel<kWhole, T>
        <<<static_cast<unsigned>(dy.size(0)), kThreads, 0, stream_of(l)>>>(
            rows<2>(dy), rows<2>(x), rows<2>(weight), rows<2>(row), rows<2>(dx),
            rows<2>(dweight));
  };
  by_alignment(run, dy, x, View<const T>(dx));
  check_launch("combine_backward");
}

#define INSTANTIATE(T)                                                  \
  template void combine_forward(Launch, View<const T>,                  \
                                View<const Accumulator<T>>,             \
                                View<const int32_t>, View<T>);          \
  template void combine_backward(                                       \
      Launch, View<const T>, View<const T>, View<const Accumulator<T>>, \
      View<const int32_t>, View<T>, View<Accumulator<T>>)
INSTANTIATE(float);
INSTANTIATE(bf16);
INSTANTIATE(double);
#undef INSTANTIATE

}  // namespace tapeline::cuda
