#include "kernels/cuda_norm.cuh"
#include "kernels/cuda_rows.cuh"
#include "kernels/rms_norm/rms_norm_cuda.h"

namespace tapeline::cuda {
namespace {

// kAdd: of x + residual, which goes to sum.
template <bool kWhole, class Plan, bool kAdd, class T>
__global__ void __launch_bounds__(Plan::kThreads)
    rms_norm_forward_kernel(Rows<const T, 2> x_ND, Rows<const T, 2> residual_ND,
                            const T* w, float eps, Rows<T, 2> sum_ND,
                            Rows<T, 2> y_ND, Rows<Accumulator<T>, 1> rstd_N) {
  using A = Accumulator<T>;
  constexpr int kN = Pack<T>::kSize;
  const int64_t i =
      int64_t{blockIdx.x} * Plan::kRows + threadIdx.x / Plan::kLanes;
  const bool live = i < x_ND.size[0];
  const int64_t d = x_ND.size[1], packs = live ? (d + kN - 1) / kN : 0;
  const RowReader<kWhole, Plan, T> x(x_ND.row(i), d, packs);
  const RowReader<kWhole, Plan, T> residual(residual_ND.row(i), d,
                                            kAdd ? packs : 0);
  const auto input = [&](int64_t j, int h) {
    Pack<T> v = x(j, h);
    if constexpr (kAdd) {
      const Pack<T> r = residual(j, h);
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        store(v.at[e], load(v.at[e]) + load(r.at[e]));
      }
    }
    return v;
  };
  A squares = 0;
  for_each_pack<Plan>(packs, [&](int64_t j, int h) {
    const Pack<T> v = input(j, h);
    if constexpr (kAdd) store_pack<kWhole>(sum_ND.row(i), j, d, v);
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
    const Pack<T> v = input(j, h), scale = load_pack<kWhole, kN>(w, j, d);
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
    rms_norm_backward_kernel(Rows<const T, 2> dy_ND, Rows<const T, 2> x_ND,
                             const T* w, Rows<const Accumulator<T>, 1> rstd_N,
                             Rows<T, 2> dx_ND) {
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

// For norm_gradients().
template <class A>
struct Terms {
  static constexpr int kMeans = 1, kSums = 1;
  Rows<const A, 1> rstd_N;

  struct Row {
    A rstd;
  };
  struct Line {
    A rstd, of_x;
    __device__ A operator()(A dy, A w, A x, A (&add)[1]) const {
      const A scaled = dy * rstd;
      add[0] = scaled * x;
      return scaled * w - x * of_x;
    }
  };
  __device__ Row row(int64_t i) const { return {rstd_N(i)}; }
  __device__ void means(A (&m)[1], A g, A x, Row) const { m[0] += g * x; }
  __device__ Line line(const A (&m)[1], Row row) const {
    return {row.rstd, m[0] * row.rstd * row.rstd * row.rstd};
  }
};

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
      rms_norm_forward_kernel<kWhole, Plan, false, T>
          <<<blocks, Plan::kThreads, 0, stream_of(l)>>>(
              rows<2>(x_ND), rows<2>(x_ND), w_D.data, eps, rows<2>(y_ND),
              rows<2>(y_ND), rows<1>(rstd_N));
    });
  };
  by_alignment(run, x_ND, w_D, View<const T>(y_ND));
  check_launch("rms_norm_forward");
}

template <class T>
void add_rms_norm_forward(Launch l, View<const T> x_ND,
                          View<const T> residual_ND, View<const T> w_D,
                          float eps, View<T> sum_ND, View<T> y_ND,
                          View<Accumulator<T>> rstd_N) {
  const int64_t n = x_ND.size(0);
  if (n == 0) return;
  const auto run = [&]<bool kWhole>() {
    by_row_length(ceil_div(x_ND.size(1), Pack<T>::kSize), [&]<class Plan>() {
      const auto blocks = static_cast<unsigned>(ceil_div(n, Plan::kRows));
      rms_norm_forward_kernel<kWhole, Plan, true, T>
          <<<blocks, Plan::kThreads, 0, stream_of(l)>>>(
              rows<2>(x_ND), rows<2>(residual_ND), w_D.data, eps,
              rows<2>(sum_ND), rows<2>(y_ND), rows<1>(rstd_N));
    });
  };
  by_alignment(run, x_ND, residual_ND, w_D, View<const T>(sum_ND),
               View<const T>(y_ND));
  check_launch("add_rms_norm_forward");
}

template <class T>
int64_t rms_norm_parts(const View<const T>& dy_ND, const View<const T>& x_ND,
                       const View<const T>& w_D, const View<T>& dx_ND) {
  if (!packable(dy_ND) || !packable(x_ND) || !packable(w_D) ||
      !packable(View<const T>(dx_ND))) {
    return 0;
  }
  return norm_plan(x_ND.size(0), x_ND.size(1), sizeof(T), 1).parts;
}

template <class A>
void rms_norm_add_parts(Launch l, View<const A> partial_PD, View<A> dw_D) {
  launch_add_norm_parts(l, partial_PD, dw_D.size(0),
                        ColumnOutputs<A, 1>{rows<1>(dw_D)});
  check_launch("rms_norm_add_parts");
}

template <class T>
void rms_norm_backward(Launch l, View<const T> dy_ND, View<const T> x_ND,
                       View<const T> w_D, View<const Accumulator<T>> rstd_N,
                       View<T> dx_ND, View<Accumulator<T>> partial_PD) {
  const int64_t n = x_ND.size(0);
  if (n == 0) return;
  if (partial_PD) {
    launch_norm_gradients(l, norm_plan(n, x_ND.size(1), sizeof(T), 1),
                          Terms<Accumulator<T>>{rows<1>(rstd_N)}, dy_ND, x_ND,
                          w_D, dx_ND, partial_PD);
    return check_launch("rms_norm_backward");
  }
  const auto run = [&]<bool kWhole>() {
    by_row_length(ceil_div(x_ND.size(1), Pack<T>::kSize), [&]<class Plan>() {
      const auto blocks = static_cast<unsigned>(ceil_div(n, Plan::kRows));
      rms_norm_backward_kernel<kWhole, Plan, T>
          <<<blocks, Plan::kThreads, 0, stream_of(l)>>>(
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
                                  View<T>, View<Accumulator<T>>);              \
  template void add_rms_norm_forward(Launch, View<const T>, View<const T>,     \
                                     View<const T>, float, View<T>, View<T>,   \
                                     View<Accumulator<T>>);                    \
  template int64_t rms_norm_parts(const View<const T>&, const View<const T>&,  \
                                  const View<const T>&, const View<T>&);       \
  template void rms_norm_backward_weight(Launch, View<const T>, View<const T>, \
                                         View<const Accumulator<T>>,           \
                                         View<Accumulator<T>>);
TAPELINE_RMS_NORM(float)
TAPELINE_RMS_NORM(bf16)
TAPELINE_RMS_NORM(double)
#undef TAPELINE_RMS_NORM
template void rms_norm_add_parts(Launch, View<const float>, View<float>);
template void rms_norm_add_parts(Launch, View<const double>, View<double>);

}  // namespace tapeline::cuda
