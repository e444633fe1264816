#include <cmath>

#include "kernels/cuda_dispatch.h"
#include "kernels/layer_norm/layer_norm.h"
#include "kernels/layer_norm/layer_norm_cuda.h"
#include "kernels/simd_math.h"

namespace tapeline {
namespace {

template <class T, class U, class S>
void check(const char* op, const View<const T>& x, const View<U>& rows,
           int64_t columns, const View<S>& mean, const View<S>& rstd) {
  CHECK(x.rank() == 2 && rows.shape == x.shape && columns == x.size(1) &&
        (mean.shape == Shape{x.size(0)}) && rstd.shape == mean.shape)
      << "[" << op << "] shapes: x is " << describe(x) << ", rows are "
      << describe(rows) << ", the weight has " << columns << ", mean is "
      << describe(mean) << ", rstd is " << describe(rstd);
  CHECK(dense_rows(x) && dense_rows(rows) && dense_rows(mean) &&
        dense_rows(rstd))
      << "[" << op << "] last strides: " << describe(x) << ", "
      << describe(rows) << ", " << describe(mean) << ", " << describe(rstd);
}

}  // namespace

template <class T>
void layer_norm_forward(Launch l, View<const T> x_ND, View<const T> w_D,
                        View<const T> b_D, float eps, View<T> y_ND,
                        View<Accumulator<T>> mean_N,
                        View<Accumulator<T>> rstd_N) {
  if (l.dry) return;
  using A = Accumulator<T>;
  check("layer_norm_forward", x_ND, y_ND, w_D.elements(), mean_N, rstd_N);
  CHECK_EQ(b_D.elements(), w_D.elements()) << "[layer_norm_forward] b";
  if (kCuda && l.on_cuda()) {
    return cuda::layer_norm_forward(l, x_ND, w_D, b_D, eps, y_ND, mean_N,
                                    rstd_N);
  }
  const int64_t d = x_ND.size(1);
  const T *w = w_D.data, *b = b_D.data;
  l.threads->parallel_for(
      x_ND.size(0), rows_per_chunk(d), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const T* x = &x_ND(i, 0);
          T* y = &y_ND(i, 0);
          const A mean = sum(x, d) / static_cast<A>(d);
          const A squares = lane_sum<A>(d, [&](int64_t j) {
            const A deviation = load(x[j]) - mean;
            return deviation * deviation;
          });
          const A rstd =
              1 / std::sqrt(squares / static_cast<A>(d) + static_cast<A>(eps));
          mean_N(i) = mean;
          rstd_N(i) = rstd;
#pragma omp simd
          for (int64_t j = 0; j < d; ++j) {
            store(y[j], (load(x[j]) - mean) * rstd * load(w[j]) + load(b[j]));
          }
        }
      });
}

template <class T>
void layer_norm_backward(Launch l, View<const T> dy_ND, View<const T> x_ND,
                         View<const T> w_D, View<const Accumulator<T>> mean_N,
                         View<const Accumulator<T>> rstd_N, View<T> dx_ND,
                         View<Accumulator<T>> partial_P2D) {
  if (l.dry) return;
  using A = Accumulator<T>;
  check("layer_norm_backward", x_ND, dy_ND, w_D.elements(), mean_N, rstd_N);
  check("layer_norm_backward", x_ND, dx_ND, w_D.elements(), mean_N, rstd_N);
  if (partial_P2D) {
    const int64_t parts = layer_norm_parts(l, dy_ND, x_ND, w_D, dx_ND);
    CHECK(parts > 0 && partial_P2D.contiguous() &&
          partial_P2D.shape == (Shape{parts, 2, x_ND.size(1)}))
        << "[layer_norm_backward] partial is " << describe(partial_P2D)
        << ", of " << parts << " parts";
  }
  if (kCuda && l.on_cuda()) {
    return cuda::layer_norm_backward(l, dy_ND, x_ND, w_D, mean_N, rstd_N, dx_ND,
                                     partial_P2D);
  }
  const int64_t d = x_ND.size(1);
  const T* w = w_D.data;
  l.threads->parallel_for(
      x_ND.size(0), rows_per_chunk(d), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const T *x = &x_ND(i, 0), *dy = &dy_ND(i, 0);
          T* dx = &dx_ND(i, 0);
          const A mean = mean_N(i), rstd = rstd_N(i);
          const A mean_g = dot(dy, w, d) / static_cast<A>(d);
          const A mean_gh = lane_sum<A>(d,
                                        [&](int64_t j) {
                                          const A h =
                                              (load(x[j]) - mean) * rstd;
                                          return load(dy[j]) * load(w[j]) * h;
                                        }) /
                            static_cast<A>(d);
#pragma omp simd
          for (int64_t j = 0; j < d; ++j) {
            const A g = load(dy[j]) * load(w[j]);
            const A h = (load(x[j]) - mean) * rstd;
            store(dx[j], rstd * (g - mean_g - h * mean_gh));
          }
        }
      });
}

template <class T>
void layer_norm_backward_weight(Launch l, View<const T> dy_ND,
                                View<const T> x_ND,
                                View<const Accumulator<T>> mean_N,
                                View<const Accumulator<T>> rstd_N,
                                View<Accumulator<T>> dw_D,
                                View<Accumulator<T>> db_D) {
  if (l.dry) return;
  using A = Accumulator<T>;
  check("layer_norm_backward_weight", x_ND, dy_ND, dw_D.elements(), mean_N,
        rstd_N);
  CHECK_EQ(db_D.elements(), dw_D.elements())
      << "[layer_norm_backward_weight] db";
  if (kCuda && l.on_cuda()) {
    return cuda::layer_norm_backward_weight(l, dy_ND, x_ND, mean_N, rstd_N,
                                            dw_D, db_D);
  }
  // Each column is one thread's, which adds the rows in order.
  l.threads->parallel_for(
      x_ND.size(1), columns_per_chunk(x_ND.size(1)),
      [&](int64_t begin, int64_t end) {
        A weight[kMaxColumnsPerChunk] = {}, bias[kMaxColumnsPerChunk] = {};
        for (int64_t i = 0; i < x_ND.size(0); ++i) {
          const T *x = &x_ND(i, begin), *dy = &dy_ND(i, begin);
          const A mean = mean_N(i), rstd = rstd_N(i);
#pragma omp simd
          for (int64_t j = 0; j < end - begin; ++j) {
            weight[j] += load(dy[j]) * ((load(x[j]) - mean) * rstd);
            bias[j] += load(dy[j]);
          }
        }
        for (int64_t j = begin; j < end; ++j) {
          dw_D(j) += weight[j - begin];
          db_D(j) += bias[j - begin];
        }
      });
}

template <class T>
int64_t layer_norm_parts(const Launch& l, const View<const T>& dy_ND,
                         const View<const T>& x_ND, const View<const T>& w_D,
                         const View<T>& dx_ND) {
  if (kCuda && l.on_cuda()) {
    return cuda::layer_norm_parts(dy_ND, x_ND, w_D, dx_ND);
  }
  return 0;  // rows come from a cache the second time
}

template <class A>
void layer_norm_add_parts(Launch l, View<const A> partial_P2D, View<A> dw_D,
                          View<A> db_D) {
  if (l.dry) return;
  CHECK(partial_P2D.rank() == 3 && partial_P2D.contiguous() &&
        partial_P2D.size(1) == 2 && dw_D.elements() == partial_P2D.size(2) &&
        db_D.shape == dw_D.shape)
      << "[layer_norm_add_parts] partial is " << describe(partial_P2D)
      << ", dw is " << describe(dw_D) << ", db is " << describe(db_D);
  if (kCuda && l.on_cuda()) {
    return cuda::layer_norm_add_parts(l, partial_P2D, dw_D, db_D);
  }
  for (int64_t j = 0; j < dw_D.size(0); ++j) {
    A dw = 0, db = 0;
    for (int64_t p = 0; p < partial_P2D.size(0); ++p) {
      dw += partial_P2D(p, 0, j);
      db += partial_P2D(p, 1, j);
    }
    dw_D(j) += dw;
    db_D(j) += db;
  }
}

Cost layer_norm_forward_cost(int64_t n, int64_t d, int64_t element_bytes) {
  return {.flops = 8.0 * n * d,
          .bytes = 1.0 * element_bytes * (2 * n * d + 2 * d)};
}

// Of backward and add_parts together.
Cost layer_norm_backward_cost(int64_t n, int64_t d, int64_t element_bytes) {
  return {.flops = 16.0 * n * d,
          .bytes = 1.0 * element_bytes * (3 * n * d + d) + 8.0 * d};
}

#define TAPELINE_LAYER_NORM(T)                                                 \
  template void layer_norm_forward(                                            \
      Launch, View<const T>, View<const T>, View<const T>, float, View<T>,     \
      View<Accumulator<T>>, View<Accumulator<T>>);                             \
  template void layer_norm_backward(Launch, View<const T>, View<const T>,      \
                                    View<const T>, View<const Accumulator<T>>, \
                                    View<const Accumulator<T>>, View<T>,       \
                                    View<Accumulator<T>>);                     \
  template int64_t layer_norm_parts(const Launch&, const View<const T>&,       \
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

}  // namespace tapeline
