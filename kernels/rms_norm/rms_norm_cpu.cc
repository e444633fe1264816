#include <cmath>

#include "kernels/cuda_dispatch.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/rms_norm/rms_norm_cuda.h"
#include "kernels/simd_math.h"

namespace tapeline {
namespace {

// x and a second tensor of rows like it, a vector of columns, one of rows.
template <class T, class U, class R>
void check(const char* op, const View<const T>& x, const View<U>& rows,
           int64_t columns, const View<R>& rstd) {
  CHECK(x.rank() == 2 && rows.shape == x.shape && columns == x.size(1) &&
        rstd.rank() == 1 && rstd.size(0) == x.size(0))
      << "[" << op << "] shapes: x is " << describe(x) << ", rows are "
      << describe(rows) << ", the weight has " << columns << ", rstd is "
      << describe(rstd);
  CHECK(dense_rows(x) && dense_rows(rows) && dense_rows(rstd))
      << "[" << op << "] last strides: " << describe(x) << ", "
      << describe(rows) << ", " << describe(rstd);
}

}  // namespace

template <class T>
void rms_norm_forward(Launch l, View<const T> x_ND, View<const T> w_D,
                      float eps, View<T> y_ND, View<Accumulator<T>> rstd_N) {
  if (l.dry) return;
  using A = Accumulator<T>;
  check("rms_norm_forward", x_ND, y_ND, w_D.elements(), rstd_N);
  if (kCuda && l.on_cuda()) {
    return cuda::rms_norm_forward(l, x_ND, w_D, eps, y_ND, rstd_N);
  }
  const int64_t d = x_ND.size(1);
  const T* w = w_D.data;
  l.threads->parallel_for(
      x_ND.size(0), rows_per_chunk(d), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const T* x = &x_ND(i, 0);
          T* y = &y_ND(i, 0);
          const A mean_square = dot(x, x, d) / static_cast<A>(d);
          const A rstd = 1 / std::sqrt(mean_square + static_cast<A>(eps));
          rstd_N(i) = rstd;
#pragma omp simd
          for (int64_t j = 0; j < d; ++j) {
            T normed;
            store(normed, load(x[j]) * rstd);
            store(y[j], load(normed) * load(w[j]));
          }
        }
      });
}

template <class T>
void add_rms_norm_forward(Launch l, View<const T> x_ND,
                          View<const T> residual_ND, View<const T> w_D,
                          float eps, View<T> sum_ND, View<T> y_ND,
                          View<Accumulator<T>> rstd_N) {
  if (l.dry) return;
  check("add_rms_norm_forward", x_ND, residual_ND, w_D.elements(), rstd_N);
  check("add_rms_norm_forward", x_ND, sum_ND, w_D.elements(), rstd_N);
  check("add_rms_norm_forward", x_ND, y_ND, w_D.elements(), rstd_N);
  if (kCuda && l.on_cuda()) {
    return cuda::add_rms_norm_forward(l, x_ND, residual_ND, w_D, eps, sum_ND,
                                      y_ND, rstd_N);
  }
  const int64_t d = x_ND.size(1);
  l.threads->parallel_for(
      x_ND.size(0), rows_per_chunk(d), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const T *x = &x_ND(i, 0), *residual = &residual_ND(i, 0);
          T* sum = &sum_ND(i, 0);
#pragma omp simd
          for (int64_t j = 0; j < d; ++j) {
            store(sum[j], load(x[j]) + load(residual[j]));
          }
        }
      });
  rms_norm_forward(l, View<const T>(sum_ND), w_D, eps, y_ND, rstd_N);
}

template <class T>
void rms_norm_backward(Launch l, View<const T> dy_ND, View<const T> x_ND,
                       View<const T> w_D, View<const Accumulator<T>> rstd_N,
                       View<T> dx_ND, View<Accumulator<T>> partial_PD) {
  if (l.dry) return;
  using A = Accumulator<T>;
  check("rms_norm_backward", x_ND, dy_ND, w_D.elements(), rstd_N);
  check("rms_norm_backward", x_ND, dx_ND, w_D.elements(), rstd_N);
  if (partial_PD) {
    const int64_t parts = rms_norm_parts(l, dy_ND, x_ND, w_D, dx_ND);
    CHECK(parts > 0 && partial_PD.contiguous() &&
          partial_PD.shape == (Shape{parts, x_ND.size(1)}))
        << "[rms_norm_backward] partial is " << describe(partial_PD) << ", of "
        << parts << " parts";
  }
  if (kCuda && l.on_cuda()) {
    return cuda::rms_norm_backward(l, dy_ND, x_ND, w_D, rstd_N, dx_ND,
                                   partial_PD);
  }
  const int64_t d = x_ND.size(1);
  const T* w = w_D.data;
  l.threads->parallel_for(x_ND.size(0), rows_per_chunk(d),
                          [&](int64_t begin, int64_t end) {
                            for (int64_t i = begin; i < end; ++i) {
                              const T *x = &x_ND(i, 0), *dy = &dy_ND(i, 0);
                              T* dx = &dx_ND(i, 0);
                              const A rstd = rstd_N(i);
                              const A gx = lane_sum<A>(d, [&](int64_t j) {
                                return load(dy[j]) * load(w[j]) * load(x[j]);
                              });
                              const A c = gx / static_cast<A>(d) * rstd * rstd;
#pragma omp simd
                              for (int64_t j = 0; j < d; ++j) {
                                const A g = load(dy[j]) * load(w[j]);
                                store(dx[j], rstd * (g - load(x[j]) * c));
                              }
                            }
                          });
}

template <class T>
void rms_norm_backward_weight(Launch l, View<const T> dy_ND, View<const T> x_ND,
                              View<const Accumulator<T>> rstd_N,
                              View<Accumulator<T>> dw_D) {
  if (l.dry) return;
  using A = Accumulator<T>;
  check("rms_norm_backward_weight", x_ND, dy_ND, dw_D.elements(), rstd_N);
  if (kCuda && l.on_cuda()) {
    return cuda::rms_norm_backward_weight(l, dy_ND, x_ND, rstd_N, dw_D);
  }
  // Each column is one thread's, which adds the rows in order.
  l.threads->parallel_for(x_ND.size(1), columns_per_chunk(x_ND.size(1)),
                          [&](int64_t begin, int64_t end) {
                            A total[kMaxColumnsPerChunk] = {};
                            for (int64_t i = 0; i < x_ND.size(0); ++i) {
                              const T *x = &x_ND(i, begin),
                                      *dy = &dy_ND(i, begin);
                              const A rstd = rstd_N(i);
#pragma omp simd
                              for (int64_t j = 0; j < end - begin; ++j) {
                                total[j] += load(dy[j]) * (load(x[j]) * rstd);
                              }
                            }
                            for (int64_t j = begin; j < end; ++j)
                              dw_D(j) += total[j - begin];
                          });
}

template <class T>
int64_t rms_norm_parts(const Launch& l, const View<const T>& dy_ND,
                       const View<const T>& x_ND, const View<const T>& w_D,
                       const View<T>& dx_ND) {
  if (kCuda && l.on_cuda()) {
    return cuda::rms_norm_parts(dy_ND, x_ND, w_D, dx_ND);
  }
  return 0;  // rows come from a cache the second time
}

template <class A>
void rms_norm_add_parts(Launch l, View<const A> partial_PD, View<A> dw_D) {
  if (l.dry) return;
  CHECK(partial_PD.rank() == 2 && partial_PD.contiguous() &&
        dw_D.elements() == partial_PD.size(1))
      << "[rms_norm_add_parts] partial is " << describe(partial_PD)
      << ", dw is " << describe(dw_D);
  if (kCuda && l.on_cuda())
    return cuda::rms_norm_add_parts(l, partial_PD, dw_D);
  for (int64_t j = 0; j < dw_D.size(0); ++j) {
    A sum = 0;
    for (int64_t p = 0; p < partial_PD.size(0); ++p) sum += partial_PD(p, j);
    dw_D(j) += sum;
  }
}

// Two additions and multiplications per element for the sum, two for y.
Cost rms_norm_forward_cost(int64_t n, int64_t d, int64_t element_bytes) {
  return {.flops = 4.0 * n * d, .bytes = 1.0 * element_bytes * (2 * n * d + d)};
}

// Of backward and backward_weight, or of backward and add_parts, which read x
// and dy once: the least.
Cost rms_norm_backward_cost(int64_t n, int64_t d, int64_t element_bytes) {
  return {.flops = 10.0 * n * d,
          .bytes = 1.0 * element_bytes * (3 * n * d + d) + 4.0 * d};
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
  template int64_t rms_norm_parts(const Launch&, const View<const T>&,         \
                                  const View<const T>&, const View<const T>&,  \
                                  const View<T>&);                             \
  template void rms_norm_backward_weight(Launch, View<const T>, View<const T>, \
                                         View<const Accumulator<T>>,           \
                                         View<Accumulator<T>>);
TAPELINE_RMS_NORM(float)
TAPELINE_RMS_NORM(bf16)
TAPELINE_RMS_NORM(double)
#undef TAPELINE_RMS_NORM
template void rms_norm_add_parts(Launch, View<const float>, View<float>);
template void rms_norm_add_parts(Launch, View<const double>, View<double>);

}  // namespace tapeline
