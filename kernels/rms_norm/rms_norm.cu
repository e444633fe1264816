#include "kernels/cuda_rows.cuh"
#include "kernels/rms_norm/rms_norm_cuda.h"

namespace tapeline::cuda {
namespace {

template <bool kWhole, class Plan, class T>
__global__ void __launch_bounds__(Plan::kThreads)
    forward(Rows<const T, 2> x_ND, const T* w, float eps, Rows<T, 2> y_ND,
            Rows<Accumulator<T>, 1> rstd_N) {
  using A = Accumulator<T>;
  constexpr int kN = Pack<T>::kSize;
  const int64_t i =
      int64_t{blockIdx.x} * Plan::kRows + threadIdx.x / Plan::kLanes;
  const bool live = i < x_ND.size[0];
  const int64_t d = x_ND.size[1], packs = live ? (d + kN - 1) / kN : 0;
  const RowReader<kWhole, Plan, T> x(x_ND.row(i), d, packs);
  A squares = 0;
  for_each_pack<Plan>(packs, [&](int64_t j, int h) {
    const Pack<T> v = x(j, h);
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      const A a = load(v.at[e]);
      squares += a * a;
    }
  });
  squares = row_sum<Plan::kLanes>(squares);
  const A rstd = 1 / sqrt(squares / static_cast<A>(d) + static_cast<A>(eps));
  if (live && threadIdx.x % Plan::kLanes == 0) rstd_N(i) = rstd;
  for_each_pack<Plan>(packs, [&](int64_t j, int h) {
    const Pack<T> v = x(j, h), scale = load_pack<kWhole, kN>(w, j, d);
    Pack<T> y;
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      T normed;
      store(normed, load(v.at[e]) * rstd);
      store(y.at[e], load(normed) * load(scale.at[e]));
    }
    store_pack<kWhole>(y_ND.row(i), j, d, y);
  });
}

template <bool kWhole, class Plan, class T>
__global__ void __launch_bounds__(Plan::kThreads)
    backward(Rows<const T, 2> dy_ND, Rows<const T, 2> x_ND, const T* w,
             Rows<const Accumulator<T>, 1> rstd_N, Rows<T, 2> dx_ND) {
  using A = Accumulator<T>;
  constexpr int kN = Pack<T>::kSize;
  const int64_t i =
      int64_t{blockIdx.x} * Plan::kRows + threadIdx.x / Plan::kLanes;
  const bool live = i < x_ND.size[0];
  const int64_t d = x_ND.size[1], packs = live ? (d + kN - 1) / kN : 0;
  const A rstd = live ? rstd_N(i) : A(0);
  const RowReader<kWhole, Plan, T> x(x_ND.row(i), d, packs);
  const RowReader<kWhole, Plan, T> dy(dy_ND.row(i), d, packs);
  A gx = 0;
  for_each_pack<Plan>(packs, [&](int64_t j, int h) {
    const Pack<T> v = x(j, h), g = dy(j, h);
    const Pack<T> scale = load_pack<kWhole, kN>(w, j, d);
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      gx += load(g.at[e]) * load(scale.at[e]) * load(v.at[e]);
    }
  });
  const A c = row_sum<Plan::kLanes>(gx) / static_cast<A>(d) * rstd * rstd;
  for_each_pack<Plan>(packs, [&](int64_t j, int h) {
    const Pack<T> v = x(j, h), g = dy(j, h);
    const Pack<T> scale = load_pack<kWhole, kN>(w, j, d);
    Pack<T> dx;
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      const A gradient = load(g.at[e]) * load(scale.at[e]);
      store(dx.at[e], rstd * (gradient - load(v.at[e]) * c));
    }
    store_pack<kWhole>(dx_ND.row(i), j, d, dx);
  });
}

// For column_sums(): dy x rstd.
template <bool kWhole, class T>
struct WeightTerms {
  static constexpr int kN = Pack<T>::kSize;
  Rows<const T, 2> dy_ND, x_ND;
  Rows<const Accumulator<T>, 1> rstd_N;

  __device__ void operator()(Accumulator<T> (&sum)[1][kN], int64_t i,
                             int64_t pack) const {
    const int64_t d = x_ND.size[1];
    const Pack<T> x = load_pack<kWhole, kN>(x_ND.row(i), pack, d);
    const Pack<T> dy = load_pack<kWhole, kN>(dy_ND.row(i), pack, d);
    const Accumulator<T> rstd = rstd_N(i);
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      sum[0][e] += load(dy.at[e]) * (load(x.at[e]) * rstd);
    }
  }
};

}  // namespace

template <class T>
void rms_norm_forward(Launch l, View<const T> x_ND, View<const T> w_D,
                      float eps, View<T> y_ND, View<Accumulator<T>> rstd_N) {
  const int64_t n = x_ND.size(0);
  if (n == 0) return;
  const auto run = [&]<bool kWhole>() {
    by_row_length(ceil_div(x_ND.size(1), Pack<T>::kSize), [&]<class Plan>() {
      const auto blocks = static_cast<unsigned>(ceil_div(n, Plan::kRows));
      forward<kWhole, Plan, T><<<blocks, Plan::kThreads, 0, stream_of(l)>>>(
          rows<2>(x_ND), w_D.data, eps, rows<2>(y_ND), rows<1>(rstd_N));
    });
  };
  by_alignment(run, x_ND, w_D, View<const T>(y_ND));
  check_launch("rms_norm_forward");
}

template <class T>
void rms_norm_backward(Launch l, View<const T> dy_ND, View<const T> x_ND,
                       View<const T> w_D, View<const Accumulator<T>> rstd_N,
                       View<T> dx_ND) {
  const int64_t n = x_ND.size(0);
  if (n == 0) return;
  const auto run = [&]<bool kWhole>() {
    by_row_length(ceil_div(x_ND.size(1), Pack<T>::kSize), [&]<class Plan>() {
      const auto blocks = static_cast<unsigned>(ceil_div(n, Plan::kRows));
      backward<kWhole, Plan, T><<<blocks, Plan::kThreads, 0, stream_of(l)>>>(
          rows<2>(dy_ND), rows<2>(x_ND), w_D.data, rows<1>(rstd_N),
          rows<2>(dx_ND));
    });
  };
  by_alignment(run, dy_ND, x_ND, w_D, View<const T>(dx_ND));
  check_launch("rms_norm_backward");
}

template <class T>
void rms_norm_backward_weight(Launch l, View<const T> dy_ND, View<const T> x_ND,
                              View<const Accumulator<T>> rstd_N,
                              View<Accumulator<T>> dw_D) {
  const auto run = [&]<bool kWhole>() {
    const WeightTerms<kWhole, T> terms = {rows<2>(dy_ND), rows<2>(x_ND),
                                          rows<1>(rstd_N)};
    const ColumnOutputs<Accumulator<T>, 1> out = {rows<1>(dw_D)};
    launch_column_sums<Pack<T>::kSize>(l, x_ND.size(0), x_ND.size(1), terms,
                                       out);
  };
  by_alignment(run, dy_ND, x_ND);
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
