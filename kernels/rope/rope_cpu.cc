#include <cmath>

#include "kernels/cuda_dispatch.h"
#include "kernels/rope/rope.h"
#include "kernels/rope/rope_cuda.h"
#include "kernels/simd_math.h"

namespace tapeline {
namespace {

template <class X, class Y>
void check(const char* op, const View<X>& x, const View<const float>& cos,
           const View<const float>& sin, const View<Y>& y) {
  CHECK(x.rank() == 3 && y.shape == x.shape && cos.rank() == 2 &&
        sin.shape == cos.shape && cos.size(0) == x.size(0) &&
        2 * cos.size(1) == x.size(2))
      << "[" << op << "] shapes: in is " << describe(x) << ", cos is "
      << describe(cos) << ", sin is " << describe(sin) << ", out is "
      << describe(y);
  CHECK(dense_rows(x) && dense_rows(y) && dense_rows(cos) && dense_rows(sin))
      << "[" << op << "] last strides: " << describe(x) << ", " << describe(y);
  CHECK(x.elements() == 0 || x.data != y.data) << "[" << op << "] in place";
}

// f(in, out, cos, sin) for every head of every token.
template <class T, class F>
void for_each_head(Launch l, const View<const T>& in, const View<T>& out,
                   const View<const float>& cos, const View<const float>& sin,
                   F f) {
  l.threads->parallel_for(in.size(0), rows_per_chunk(in.size(1) * in.size(2)),
                          [&](int64_t begin, int64_t end) {
                            for (int64_t t = begin; t < end; ++t) {
                              for (int64_t h = 0; h < in.size(1); ++h) {
                                f(&in(t, h, 0), &out(t, h, 0), &cos(t, 0),
                                  &sin(t, 0));
                              }
                            }
                          });
}

}  // namespace

void rope_table(Launch l, View<const int32_t> positions_T,
                const std::vector<double>& inverse_frequencies, double factor,
                View<float> cos_TR2, View<float> sin_TR2) {
  if (l.dry) return;
  const int64_t half = static_cast<int64_t>(inverse_frequencies.size());
  CHECK(positions_T.rank() == 1 && sin_TR2.shape == cos_TR2.shape &&
        (cos_TR2.shape == Shape{positions_T.size(0), half}))
      << "[rope_table] shapes: positions are " << describe(positions_T)
      << ", cos is " << describe(cos_TR2) << ", sin is " << describe(sin_TR2)
      << ", frequencies " << half;
  if (kCuda && l.on_cuda()) {
    return cuda::rope_table(l, positions_T, inverse_frequencies, factor,
                            cos_TR2, sin_TR2);
  }
  l.threads->parallel_for(
      positions_T.size(0), rows_per_chunk(8 * half),
      [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          const float position = static_cast<float>(positions_T(t));
          for (int64_t j = 0; j < half; ++j) {
            const double angle =
                position * static_cast<float>(inverse_frequencies[j]);
            cos_TR2(t, j) = static_cast<float>(std::cos(angle) * factor);
            sin_TR2(t, j) = static_cast<float>(std::sin(angle) * factor);
          }
        }
      });
}

template <class T>
void rope_forward(Launch l, View<const T> x_THR, View<const float> cos_TR2,
                  View<const float> sin_TR2, bool interleaved, View<T> y_THR) {
  if (l.dry) return;
  using A = Accumulator<T>;
  check("rope_forward", x_THR, cos_TR2, sin_TR2, y_THR);
  if (kCuda && l.on_cuda()) {
    return cuda::rope_forward(l, x_THR, cos_TR2, sin_TR2, interleaved, y_THR);
  }
  const int64_t half = cos_TR2.size(1);
  const auto turn = [half](const T* x0, const T* x1, int64_t step, T* y,
                           const float* c, const float* s) {
#pragma omp simd
    for (int64_t j = 0; j < half; ++j) {
      const A a = load(x0[j * step]), b = load(x1[j * step]);
      store(y[j], a * A(c[j]) - b * A(s[j]));
      store(y[j + half], b * A(c[j]) + a * A(s[j]));
    }
  };
  for_each_head(l, x_THR, y_THR, cos_TR2, sin_TR2,
                [&](const T* x, T* y, const float* c, const float* s) {
                  if (interleaved)
                    turn(x, x + 1, 2, y, c, s);
                  else
                    turn(x, x + half, 1, y, c, s);
                });
}

template <class T>
void rope_backward(Launch l, View<const T> dy_THR, View<const float> cos_TR2,
                   View<const float> sin_TR2, bool interleaved,
                   View<T> dx_THR) {
  if (l.dry) return;
  using A = Accumulator<T>;
  check("rope_backward", dy_THR, cos_TR2, sin_TR2, dx_THR);
  if (kCuda && l.on_cuda()) {
    return cuda::rope_backward(l, dy_THR, cos_TR2, sin_TR2, interleaved,
                               dx_THR);
  }
  const int64_t half = cos_TR2.size(1);
  const auto turn_back = [half](const T* dy, T* dx0, T* dx1, int64_t step,
                                const float* c, const float* s) {
#pragma omp simd
    for (int64_t j = 0; j < half; ++j) {
      const A a = load(dy[j]), b = load(dy[j + half]);
      store(dx0[j * step], a * A(c[j]) + b * A(s[j]));
      store(dx1[j * step], b * A(c[j]) - a * A(s[j]));
    }
  };
  for_each_head(l, dy_THR, dx_THR, cos_TR2, sin_TR2,
                [&](const T* dy, T* dx, const float* c, const float* s) {
                  if (interleaved)
                    turn_back(dy, dx, dx + 1, 2, c, s);
                  else
                    turn_back(dy, dx, dx + half, 1, c, s);
                });
}

Cost rope_cost(int64_t t, int64_t h, int64_t r, int64_t element_bytes) {
  return {.flops = 3.0 * t * h * r,
          .bytes = 2.0 * t * h * r * element_bytes + 4.0 * t * r};
}

#define TAPELINE_ROPE(T)                                                \
  template void rope_forward(Launch, View<const T>, View<const float>,  \
                             View<const float>, bool, View<T>);         \
  template void rope_backward(Launch, View<const T>, View<const float>, \
                              View<const float>, bool, View<T>);
TAPELINE_ROPE(float)
TAPELINE_ROPE(bf16)
TAPELINE_ROPE(double)
#undef TAPELINE_ROPE

}  // namespace tapeline
