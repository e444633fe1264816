#include "kernels/cuda_rows.cuh"
#include "kernels/dispatch/dispatch_cuda.h"

namespace tapeline::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kHeld = 4;   // packs of a token that a thread copies at a time
constexpr int kSlots = 8;  // rows that a thread reads at a time

// One block a token: its row is read once and stays in registers while it is
// written K times.
template <bool kWhole, class T>
__global__ void __launch_bounds__(kThreads)
    dispatch_forward_kernel(Rows<const T, 2> x, Rows<const int32_t, 2> row,
                            Rows<T, 2> routed) {
  constexpr int kN = Pack<T>::kSize;
  const int64_t t = blockIdx.x, width = x.size[1];
  const int64_t packs = (width + kN - 1) / kN;
  for (int64_t j = threadIdx.x; j < packs; j += kThreads * kHeld) {
    Pack<T> held[kHeld];
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int64_t at = j + h * kThreads;
      if (at < packs) held[h] = load_pack<kWhole, kN>(x.row(t), at, width);
    }
    for (int64_t k = 0; k < row.size[1]; ++k) {
      const int32_t r = row(t, k);
      if (r < 0) continue;
#pragma unroll
      for (int h = 0; h < kHeld; ++h) {
        const int64_t at = j + h * kThreads;
        if (at < packs) store_pack<kWhole>(routed.row(r), at, width, held[h]);
      }
    }
  }
}

// One block a token; up to kSlots rows are read at a time and added in
// ascending order of slots.
template <bool kWhole, class T>
__global__ void __launch_bounds__(kThreads)
    dispatch_backward_kernel(Rows<const T, 2> routed,
                             Rows<const int32_t, 2> row, Rows<T, 2> dx) {
  using A = Accumulator<T>;
  constexpr int kN = Pack<T>::kSize;
  const int64_t t = blockIdx.x, width = dx.size[1], top_k = row.size[1];
  const int64_t packs = (width + kN - 1) / kN;
  for (int64_t j = threadIdx.x; j < packs; j += kThreads) {
    A sum[kN] = {};
    for (int64_t k0 = 0; k0 < top_k; k0 += kSlots) {
      Pack<T> from[kSlots];
      bool routed_to[kSlots];
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const int32_t r = k0 + s < top_k ? row(t, k0 + s) : -1;
        routed_to[s] = r >= 0;
        if (r >= 0) from[s] = load_pack<kWhole, kN>(routed.row(r), j, width);
      }
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        if (!routed_to[s]) continue;
#pragma unroll
        for (int e = 0; e < kN; ++e) sum[e] += load(from[s].at[e]);
      }
    }
    Pack<T> out;
#pragma unroll
    for (int e = 0; e < kN; ++e) store(out.at[e], sum[e]);
    store_pack<kWhole>(dx.row(t), j, width, out);
  }
}

}  // namespace

template <class T>
void dispatch_forward(Launch l, View<const T> x, View<const int32_t> row,
                      View<T> x_routed) {
  if (x.elements() == 0) return;
  const auto run = [&]<bool kWhole>() {
    dispatch_forward_kernel<kWhole, T>
        <<<static_cast<unsigned>(x.size(0)), kThreads, 0, stream_of(l)>>>(
            rows<2>(x), rows<2>(row), rows<2>(x_routed));
  };
  by_alignment(run, x, View<const T>(x_routed));
  check_launch("dispatch_forward");
}

template <class T>
void dispatch_backward(Launch l, View<const T> dx_routed,
                       View<const int32_t> row, View<T> dx) {
  if (dx.elements() == 0) return;
  const auto run = [&]<bool kWhole>() {
    dispatch_backward_kernel<kWhole, T>
        <<<static_cast<unsigned>(dx.size(0)), kThreads, 0, stream_of(l)>>>(
            rows<2>(dx_routed), rows<2>(row), rows<2>(dx));
  };
  by_alignment(run, dx_routed, View<const T>(dx));
  check_launch("dispatch_backward");
}

#define INSTANTIATE(T)                                                        \
  template void dispatch_forward(Launch, View<const T>, View<const int32_t>,  \
                                 View<T>);                                    \
  template void dispatch_backward(Launch, View<const T>, View<const int32_t>, \
                                  View<T>)
INSTANTIATE(float);
INSTANTIATE(bf16);
INSTANTIATE(double);
#undef INSTANTIATE

}  // namespace tapeline::cuda
