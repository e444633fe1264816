#include "kernels/cuda_launch.cuh"
#include "kernels/cuda_norm.cuh"
#include "kernels/cuda_rows.cuh"
#include "kernels/layer_norm/layer_norm_cuda.h"

namespace tapeline::cuda {
namespace {

template <bool kWhole, class Plan, class T>
__global__ void __launch_bounds__(Plan::kThreads)
    layer_norm_forward_kernel(Rows<const T, 2> x_ND, const T* w, const T* b,
                              float eps, Rows<T, 2> y_ND,
                              Rows<Accumulator<T>, 1> mean_N,
                              Rows<Accumulator<T>, 1> rstd_N) {
  using A = Accumulator<T>;
  constexpr int kN = Pack<T>::kSize;
  const int64_t i =
      int64_t{blockIdx.x} * Plan::kRows + threadIdx.x / Plan::kLanes;
  const bool live = i < x_ND.size[0];
  const int64_t d = x_ND.size[1], packs = live ? (d + kN - 1) / kN : 0;
  const RowReader<kWhole, Plan, T> x(x_ND.row(i), d, packs);
  A sum = 0;
  for_each_pack<Plan>(packs, [&](int64_t j, int h) {
    const Pack<T> v = x(j, h);
#pragma unroll
    for (int e = 0; e < kN; ++e) sum += load(v.at[e]);
  });
  const A mean = row_sum<Plan::kLanes>(sum) / static_cast<A>(d);
  A squares = 0;
  for_each_pack<Plan>(packs, [&](int64_t j, int h) {
    const Pack<T> v = x(j, h);
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      // What lies beyond the row is no deviation.
      if (!kWhole && j * kN + e >= d) continue;
      const A deviation = load(v.at[e]) - mean;
      squares += deviation * deviation;
    }
  });
  squares = row_sum<Plan::kLanes>(squares);
  const A rstd = 1 / sqrt(squares / static_cast<A>(d) + static_cast<A>(eps));
  if (live && threadIdx.x % Plan::kLanes == 0) {
    mean_N(i) = mean;
    rstd_N(i) = rstd;
  }
  for_each_pack<Plan>(packs, [&](int64_t j, int h) {
    const Pack<T> v = x(j, h);
    const Pack<T> scale = load_pack<kWhole, kN>(w, j, d);
    const Pack<T> shift = load_pack<kWhole, kN>(b, j, d);
    Pack<T> y;
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      store(y.at[e], (load(v.at[e]) - mean) * rstd * load(scale.at[e]) +
                         load(shift.at[e]));
    }
    store_pack<kWhole>(y_ND.row(i), j, d, y);
  });
}

// The sums of kEach rows over the kLanes lanes of a warp that share them.
template <int kLanes, int kEach, class A>
__device__ void row_sums(A (&value)[kEach]) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      value[e] += __shfl_xor_sync(~0u, value[e], step);
    }
  }
}

// Short rows of whole packs: kLanes threads share one, a pack each, and have
// kEach rows in flight, so that all rows are under way in few rounds of blocks.
constexpr int kShortThreads = 256, kShortEach = 2;
template <int kLanes, class T>
__global__ void __launch_bounds__(kShortThreads, 8)
    layer_norm_forward_short_kernel(Rows<const T, 2> x_ND, const T* w,
                                    const T* b, float eps, Rows<T, 2> y_ND,
                                    Rows<Accumulator<T>, 1> mean_N,
                                    Rows<Accumulator<T>, 1> rstd_N) {
  using A = Accumulator<T>;
  constexpr int kN = Pack<T>::kSize, kGroups = kShortThreads / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t first =
      int64_t{blockIdx.x} * (kGroups * kShortEach) + threadIdx.x / kLanes;
  const int64_t n = x_ND.size[0];
  const int d = static_cast<int>(x_ND.size[1]);
  const bool inside = lane * kN < d;
  wait_for_earlier();
  Words<T> x[kShortEach], scale, shift;
#pragma unroll
  for (int e = 0; e < kShortEach; ++e) {
    const int64_t i = first + e * kGroups;
    if (inside && i < n) x[e] = Words<T>::load(x_ND.row(i), lane);
  }
  if (inside) {
    scale = Words<T>::load(w, lane);
    shift = Words<T>::load(b, lane);
  }
  // Step by step for all rows, whose waits for other lanes then overlap.
  A mean[kShortEach] = {}, rstd[kShortEach] = {};
#pragma unroll
  for (int e = 0; e < kShortEach; ++e) {
#pragma unroll
    for (int k = 0; k < kN; ++k) mean[e] += x[e][k];
  }
  row_sums<kLanes>(mean);
#pragma unroll
  for (int e = 0; e < kShortEach; ++e) {
    x[e].narrow();
    mean[e] /= static_cast<A>(d);
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      const A deviation = inside ? x[e][k] - mean[e] : A(0);
      rstd[e] += deviation * deviation;
    }
  }
  row_sums<kLanes>(rstd);
#pragma unroll
  for (int e = 0; e < kShortEach; ++e) {
    x[e].narrow();
    const int64_t i = first + e * kGroups;
    rstd[e] = 1 / sqrt(rstd[e] / static_cast<A>(d) + static_cast<A>(eps));
    if (i >= n) continue;
    if (lane == 0) {
      mean_N(i) = mean[e];
      rstd_N(i) = rstd[e];
    }
    if (!inside) continue;
    A y[kN];
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      y[k] = (x[e][k] - mean[e]) * rstd[e] * scale[k] + shift[k];
    }
    Words<T>::rounded(y).store(y_ND.row(i), lane);
  }
}

template <bool kWhole, class Plan, class T>
__global__ void __launch_bounds__(Plan::kThreads)
    layer_norm_backward_kernel(Rows<const T, 2> dy_ND, Rows<const T, 2> x_ND,
                               const T* w, Rows<const Accumulator<T>, 1> mean_N,
                               Rows<const Accumulator<T>, 1> rstd_N,
                               Rows<T, 2> dx_ND) {
  using A = Accumulator<T>;
  constexpr int kN = Pack<T>::kSize;
  const int64_t i =
      int64_t{blockIdx.x} * Plan::kRows + threadIdx.x / Plan::kLanes;
  const bool live = i < x_ND.size[0];
  const int64_t d = x_ND.size[1], packs = live ? (d + kN - 1) / kN : 0;
  const A mean = live ? mean_N(i) : A(0), rstd = live ? rstd_N(i) : A(0);
  const RowReader<kWhole, Plan, T> x(x_ND.row(i), d, packs);
  const RowReader<kWhole, Plan, T> dy(dy_ND.row(i), d, packs);
  A sum_g = 0, sum_gh = 0;
  for_each_pack<Plan>(packs, [&](int64_t j, int h) {
    const Pack<T> v = x(j, h), gradient = dy(j, h);
    const Pack<T> scale = load_pack<kWhole, kN>(w, j, d);
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      const A g = load(gradient.at[e]) * load(scale.at[e]);
      sum_g += g;
      sum_gh += g * ((load(v.at[e]) - mean) * rstd);
    }
  });
  const A mean_g = row_sum<Plan::kLanes>(sum_g) / static_cast<A>(d);
  const A mean_gh = row_sum<Plan::kLanes>(sum_gh) / static_cast<A>(d);
  for_each_pack<Plan>(packs, [&](int64_t j, int h) {
    const Pack<T> v = x(j, h), gradient = dy(j, h);
    const Pack<T> scale = load_pack<kWhole, kN>(w, j, d);
    Pack<T> dx;
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      const A g = load(gradient.at[e]) * load(scale.at[e]);
      const A normed = (load(v.at[e]) - mean) * rstd;
      store(dx.at[e], rstd * (g - mean_g - normed * mean_gh));
    }
    store_pack<kWhole>(dx_ND.row(i), j, d, dx);
  });
}

// For norm_gradients(). A deviation is x - mean, h = deviation * rstd.
template <class A>
struct Terms {
  static constexpr int kMeans = 2, kSums = 2;
  Rows<const A, 1> mean_N, rstd_N;

  struct Row {
    A mean, rstd;
  };
  struct Line {
    A mean, rstd, of_deviation, constant;
    __device__ A operator()(A dy, A w, A x, A (&add)[2]) const {
      const A deviation = x - mean, scaled = dy * rstd;
      add[0] = scaled * deviation;
      add[1] = dy;
      return scaled * w - (deviation * of_deviation + constant);
    }
  };
  __device__ Row row(int64_t i) const { return {mean_N(i), rstd_N(i)}; }
  __device__ void means(A (&m)[2], A g, A x, Row row) const {
    m[0] += g;
    m[1] += g * (x - row.mean);
  }
  __device__ Line line(const A (&m)[2], Row row) const {
    const A r = row.rstd;
    return {row.mean, r, m[1] * r * r * r, m[0] * r};
  }
};

// For column_sums(): dy h and dy.
template <bool kWhole, class T>
struct WeightTerms {
  static constexpr int kN = Pack<T>::kSize;
  Rows<const T, 2> dy_ND, x_ND;
  Rows<const Accumulator<T>, 1> mean_N, rstd_N;

  __device__ void operator()(Accumulator<T> (&sum)[2][kN], int64_t i,
                             int64_t pack) const {
    const int64_t d = x_ND.size[1];
    const Pack<T> x = load_pack<kWhole, kN>(x_ND.row(i), pack, d);
    const Pack<T> dy = load_pack<kWhole, kN>(dy_ND.row(i), pack, d);
    const Accumulator<T> mean = mean_N(i), rstd = rstd_N(i);
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      sum[0][e] += load(dy.at[e]) * ((load(x.at[e]) - mean) * rstd);
      sum[1][e] += load(dy.at[e]);
    }
  }
};

}  // namespace

template <class T>
void layer_norm_forward(Launch l, View<const T> x_ND, View<const T> w_D,
                        View<const T> b_D, float eps, View<T> y_ND,
                        View<Accumulator<T>> mean_N,
                        View<Accumulator<T>> rstd_N) {
  const int64_t n = x_ND.size(0), packs = x_ND.size(1) / Pack<T>::kSize;
  if (n == 0) return;
  const auto run_short = [&]<int kLanes>() {
    constexpr int kRows = kShortThreads / kLanes * kShortEach;
    launch_early(l, layer_norm_forward_short_kernel<kLanes, T>,
                 dim3(static_cast<unsigned>(ceil_div(n, kRows))), kShortThreads,
                 0, 1, rows<2>(x_ND), w_D.data, b_D.data, eps, rows<2>(y_ND),
                 rows<1>(mean_N), rows<1>(rstd_N));
    check_launch("layer_norm_forward");
  };
  if (packs <= kWarp && packable(x_ND) && packable(w_D) && packable(b_D) &&
      packable(View<const T>(y_ND))) {
    if (packs <= 8) return run_short.template operator()<8>();
    if (packs <= 16) return run_short.template operator()<16>();
    return run_short.template operator()<32>();
  }
  const auto run = [&]<bool kWhole>() {
    by_row_length(ceil_div(x_ND.size(1), Pack<T>::kSize), [&]<class Plan>() {
      const auto blocks = static_cast<unsigned>(ceil_div(n, Plan::kRows));
      layer_norm_forward_kernel<kWhole, Plan, T>
          <<<blocks, Plan::kThreads, 0, stream_of(l)>>>(
              rows<2>(x_ND), w_D.data, b_D.data, eps, rows<2>(y_ND),
              rows<1>(mean_N), rows<1>(rstd_N));
    });
  };
  by_alignment(run, x_ND, w_D, b_D, View<const T>(y_ND));
  check_launch("layer_norm_forward");
}

template <class T>
void layer_norm_backward(Launch l, View<const T> dy_ND, View<const T> x_ND,
                         View<const T> w_D, View<const Accumulator<T>> mean_N,
                         View<const Accumulator<T>> rstd_N, View<T> dx_ND,
                         View<Accumulator<T>> partial_P2D) {
  const int64_t n = x_ND.size(0);
  if (n == 0) return;
  if (partial_P2D) {
    launch_norm_gradients(
        l, norm_plan(n, x_ND.size(1), sizeof(T), 2),
        Terms<Accumulator<T>>{rows<1>(mean_N), rows<1>(rstd_N)}, dy_ND, x_ND,
        w_D, dx_ND, partial_P2D);
    return check_launch("layer_norm_backward");
  }
  const auto run = [&]<bool kWhole>() {
    by_row_length(ceil_div(x_ND.size(1), Pack<T>::kSize), [&]<class Plan>() {
      const auto blocks = static_cast<unsigned>(ceil_div(n, Plan::kRows));
      layer_norm_backward_kernel<kWhole, Plan, T>
          <<<blocks, Plan::kThreads, 0, stream_of(l)>>>(
              rows<2>(dy_ND), rows<2>(x_ND), w_D.data, rows<1>(mean_N),
              rows<1>(rstd_N), rows<2>(dx_ND));
    });
  };
  by_alignment(run, dy_ND, x_ND, w_D, View<const T>(dx_ND));
  check_launch("layer_norm_backward");
}

template <class T>
void layer_norm_backward_weight(Launch l, View<const T> dy_ND,
                                View<const T> x_ND,
                                View<const Accumulator<T>> mean_N,
                                View<const Accumulator<T>> rstd_N,
                                View<Accumulator<T>> dw_D,
                                View<Accumulator<T>> db_D) {
  const auto run = [&]<bool kWhole>() {
    const WeightTerms<kWhole, T> terms = {rows<2>(dy_ND), rows<2>(x_ND),
                                          rows<1>(mean_N), rows<1>(rstd_N)};
    const ColumnOutputs<Accumulator<T>, 2> out = {rows<1>(dw_D), rows<1>(db_D)};
    launch_column_sums<Pack<T>::kSize>(l, x_ND.size(0), x_ND.size(1), terms,
                                       out);
  };
  by_alignment(run, dy_ND, x_ND);
  check_launch("layer_norm_backward_weight");
}

template <class T>
int64_t layer_norm_parts(const View<const T>& dy_ND, const View<const T>& x_ND,
                         const View<const T>& w_D, const View<T>& dx_ND) {
  if (!packable(dy_ND) || !packable(x_ND) || !packable(w_D) ||
      !packable(View<const T>(dx_ND))) {
    return 0;
  }
  return norm_plan(x_ND.size(0), x_ND.size(1), sizeof(T), 2).parts;
}

template <class A>
void layer_norm_add_parts(Launch l, View<const A> partial_P2D, View<A> dw_D,
                          View<A> db_D) {
  launch_add_norm_parts(l, partial_P2D, dw_D.size(0),
                        ColumnOutputs<A, 2>{rows<1>(dw_D), rows<1>(db_D)});
  check_launch("layer_norm_add_parts");
}

#define TAPELINE_LAYER_NORM(T)                                                 \
  template void layer_norm_forward(                                            \
      Launch, View<const T>, View<const T>, View<const T>, float, View<T>,     \
      View<Accumulator<T>>, View<Accumulator<T>>);                             \
  template void layer_norm_backward(Launch, View<const T>, View<const T>,      \
                                    View<const T>, View<const Accumulator<T>>, \
                                    View<const Accumulator<T>>, View<T>,       \
                                    View<Accumulator<T>>);                     \
  template int64_t layer_norm_parts(const View<const T>&,                      \
                                    const View<const T>&,                      \
                                    const View<const T>&, const View<T>&);     \
  template void layer_norm_backward_weight(                                    \
      Launch, View<const T>, View<const T>, View<const Accumulator<T>>,        \
      View<const Accumulator<T>>, View<Accumulator<T>>, View<Accumulator<T>>);
TAPELINE_LAYER_NORM(float)
TAPELINE_LAYER_NORM(bf16)
TAPELINE_LAYER_NORM(double)
#undef TAPELINE_LAYER_NORM
template void layer_norm_add_parts(Launch, View<const float>, View<float>,
                                   View<float>);
template void layer_norm_add_parts(Launch, View<const double>, View<double>,
                                   View<double>);

}  // namespace tapeline::cuda
