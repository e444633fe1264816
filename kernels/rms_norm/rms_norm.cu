#include "kernels/cuda.cuh"
#include "kernels/rms_norm/rms_norm_cuda.h"

namespace tapeline::cuda {
namespace {

constexpr int kThreads = 256;

// One block a row, which is walked kPack elements at a time: a full pack where
// the rows allow it, else one.
template <int kPack, class T>
__global__ void forward(Rows<const T, 2> x_ND, const T* w, float eps,
                        Rows<T, 2> y_ND, Rows<Accumulator<T>, 1> rstd_N) {
  using A = Accumulator<T>;
  using V = Pack<T, kPack>;
  const int64_t i = blockIdx.x, d = x_ND.size[1];
  const V* x = reinterpret_cast<const V*>(x_ND.row(i));
  V* y = reinterpret_cast<V*>(y_ND.row(i));
  A squares = 0;
  for (int64_t j = threadIdx.x; j < d / kPack; j += kThreads) {
    const V v = x[j];
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      const A a = load(v.at[e]);
      squares += a * a;
    }
  }
  squares = block_sum<kThreads>(squares);
  const A rstd = 1 / sqrt(squares / static_cast<A>(d) + static_cast<A>(eps));
  if (threadIdx.x == 0) rstd_N(i) = rstd;
  for (int64_t j = threadIdx.x; j < d / kPack; j += kThreads) {
    const V v = x[j];
    const V scale = reinterpret_cast<const V*>(w)[j];
    V out;
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      T normed;
      store(normed, load(v.at[e]) * rstd);
      store(out.at[e], load(normed) * load(scale.at[e]));
    }
    y[j] = out;
  }
}

template <int kPack, class T>
__global__ void backward(Rows<const T, 2> dy_ND, Rows<const T, 2> x_ND,
                         const T* w, Rows<const Accumulator<T>, 1> rstd_N,
                         Rows<T, 2> dx_ND) {
  using A = Accumulator<T>;
  using V = Pack<T, kPack>;
  const int64_t i = blockIdx.x, d = x_ND.size[1];
  const V* x = reinterpret_cast<const V*>(x_ND.row(i));
  const V* dy = reinterpret_cast<const V*>(dy_ND.row(i));
  V* dx = reinterpret_cast<V*>(dx_ND.row(i));
  const A rstd = rstd_N(i);
  A gx = 0;
  for (int64_t j = threadIdx.x; j < d / kPack; j += kThreads) {
    const V v = x[j], g = dy[j], scale = reinterpret_cast<const V*>(w)[j];
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      gx += load(g.at[e]) * load(scale.at[e]) * load(v.at[e]);
    }
  }
  const A c = block_sum<kThreads>(gx) / static_cast<A>(d) * rstd * rstd;
  for (int64_t j = threadIdx.x; j < d / kPack; j += kThreads) {
    const V v = x[j], g = dy[j], scale = reinterpret_cast<const V*>(w)[j];
    V out;
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      const A gradient = load(g.at[e]) * load(scale.at[e]);
      store(out.at[e], rstd * (gradient - load(v.at[e]) * c));
    }
    dx[j] = out;
  }
}

// A block has 32 columns; its warps share the rows, each adding every
// kWarps-th, and the first warp adds their sums in order.
template <class T>
__global__ void backward_weight(Rows<const T, 2> dy_ND, Rows<const T, 2> x_ND,
                                Rows<const Accumulator<T>, 1> rstd_N,
                                Rows<Accumulator<T>, 1> dw_D) {
  using A = Accumulator<T>;
  constexpr int kWarps = 1024 / kWarp;
  __shared__ A sums[kWarps][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t j = blockIdx.x * int64_t{kWarp} + lane;
  A sum = 0;
  if (j < x_ND.size[1]) {
#pragma unroll 4
    for (int64_t i = warp; i < x_ND.size[0]; i += kWarps) {
      sum += load(dy_ND(i, j)) * (load(x_ND(i, j)) * rstd_N(i));
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || j >= x_ND.size[1]) return;
  A total = 0;
  for (int w = 0; w < kWarps; ++w) total += sums[w][lane];
  dw_D(j) += total;
}

template <class T>
bool packed(const View<const T>& x, const View<const T>& w) {
  return packable(x) && packable(w);
}

}  // namespace

template <class T>
void rms_norm_forward(Launch l, View<const T> x_ND, View<const T> w_D,
                      float eps, View<T> y_ND, View<Accumulator<T>> rstd_N) {
  const auto blocks = static_cast<unsigned>(x_ND.size(0));
  if (blocks == 0) return;
  const bool packs = packed(x_ND, w_D) && packable(y_ND);
  const auto kernel = packs ? forward<Pack<T>::kSize, T> : forward<1, T>;
  kernel<<<blocks, kThreads, 0, stream_of(l)>>>(rows<2>(x_ND), w_D.data, eps,
                                                rows<2>(y_ND), rows<1>(rstd_N));
  check_launch("rms_norm_forward");
}

template <class T>
void rms_norm_backward(Launch l, View<const T> dy_ND, View<const T> x_ND,
                       View<const T> w_D, View<const Accumulator<T>> rstd_N,
                       View<T> dx_ND) {
  const auto blocks = static_cast<unsigned>(x_ND.size(0));
  if (blocks == 0) return;
  const bool packs = packed(x_ND, w_D) && packable(dy_ND) && packable(dx_ND);
  const auto kernel = packs ? backward<Pack<T>::kSize, T> : backward<1, T>;
  kernel<<<blocks, kThreads, 0, stream_of(l)>>>(
      rows<2>(dy_ND), rows<2>(x_ND), w_D.data, rows<1>(rstd_N), rows<2>(dx_ND));
  check_launch("rms_norm_backward");
}

template <class T>
void rms_norm_backward_weight(Launch l, View<const T> dy_ND, View<const T> x_ND,
                              View<const Accumulator<T>> rstd_N,
                              View<Accumulator<T>> dw_D) {
  const auto blocks = static_cast<unsigned>(ceil_div(x_ND.size(1), kWarp));
  if (blocks == 0) return;
  backward_weight<T><<<blocks, 1024, 0, stream_of(l)>>>(
      rows<2>(dy_ND), rows<2>(x_ND), rows<1>(rstd_N), rows<1>(dw_D));
  check_launch("rms_norm_backward_weight");
}

#define TAPELINE_RMS_NORM(T)                                                   \
  template void rms_norm_forward(Launch, View<const T>, View<const T>, float,  \
                                 View<T>, View<Accumulator<T>>);               \
  template void rms_norm_backward(Launch, View<const T>, View<const T>,        \
                                  View<const T>, View<const Accumulator<T>>,   \
                                  View<T>);                                    \
  template void rms_norm_backward_weight(Launch, View<const T>, View<const T>, \
                                         View<const Accumulator<T>>,           \
                                         View<Accumulator<T>>);
TAPELINE_RMS_NORM(float)
TAPELINE_RMS_NORM(bf16)
TAPELINE_RMS_NORM(double)
#undef TAPELINE_RMS_NORM

}  // namespace tapeline::cuda
