#include "tests/support/close.h"

#include <cmath>
#include <cstring>
#include <sstream>

namespace tapeline {
namespace {

// Largest relative error of one rounding to nearest.
double rounding(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 0x1p-53;
    case DType::kBf16:
      return 0x1p-9;
    default:
      return 0x1p-24;
  }
}

// Below this many elements a row's root mean square says little about the size
// of the terms behind its elements; the whole tensor's stands in.
constexpr int64_t kShortRow = 8;

// Calls f(index, offset of a, offset of b) for every element, last dimension
// fastest.
template <class F>
void for_each(const Shape& shape, const Shape& a, const Shape& b, F f) {
  const int64_t n = shape.elements();
  Shape index = shape;
  for (int d = 0; d < shape.rank(); ++d) index[d] = 0;
  for (int64_t i = 0; i < n; ++i) {
    int64_t at_a = 0, at_b = 0;
    for (int d = 0; d < shape.rank(); ++d) {
      at_a += index[d] * a[d];
      at_b += index[d] * b[d];
    }
    f(index, at_a, at_b);
    for (int d = shape.rank() - 1; d >= 0 && ++index[d] == shape[d]; --d) {
      index[d] = 0;
    }
  }
}

template <class T>
double as_double(T x) {
  if constexpr (std::is_same_v<T, bf16>)
    return float{x};
  else
    return static_cast<double>(x);
}

// Both NaN, or the same infinity, or both finite.
bool same_kind(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  if (std::isinf(a) || std::isinf(b)) return a == b;
  return true;
}

// Positions that break a rule; keeps the worst.
struct Violations {
  int64_t count = 0;
  double worst = 0;  // by how much the bound is exceeded, as a factor
  Shape index;
  double got = 0, expected = 0;

  void add(double excess, const Shape& at, double x, double y) {
    if (count++ == 0 || excess > worst) {
      worst = excess;
      index = at;
      got = x;
      expected = y;
    }
  }
  testing::AssertionResult report(const char* rule, int64_t elements) const {
    std::ostringstream out;
    out.precision(9);
    out << "[" << rule << "] " << count << " of " << elements
        << " elements differ, worst at " << index << ": got " << got
        << ", expected " << expected << ", " << worst << " times the bound";
    return testing::AssertionFailure() << out.str();
  }
};

// Root mean square of the finite expected values of each row.
template <class R>
std::vector<double> row_scales(View<const R> y) {
  const int64_t length = y.rank() > 0 ? y.size(-1) : 1;
  const int64_t rows = length > 0 ? y.elements() / length : 0;
  std::vector<double> squares(rows, 0.0);
  double total = 0;
  int64_t i = 0;
  for_each(y.shape, y.strides, y.strides,
           [&](const Shape&, int64_t at, int64_t) {
             const double v = as_double(y.data[at]);
             if (std::isfinite(v)) squares[i / length] += v * v;
             ++i;
           });
  for (double s : squares) total += s;
  for (double& s : squares) {
    s = length < kShortRow ? std::sqrt(total / static_cast<double>(i))
                           : std::sqrt(s / static_cast<double>(length));
  }
  return squares;
}

}  // namespace

Bounds bounds(DType got, DType expected, const Tolerance& tolerance) {
  const double u = rounding(got) + rounding(expected);
  const double u_sum =
      rounding(got == DType::kF64 ? DType::kF64 : DType::kF32) +
      rounding(expected);
  // Additions of random sign: the error of a sum of n terms grows like sqrt(n)
  // times the rounding of a typical partial sum.
  const double sum = std::sqrt(static_cast<double>(
                         std::max<int64_t>(tolerance.sum_length, 1))) *
                     u_sum;
  // One rounding to nearest is off by 0.4 u in the root mean square; 1.5 u
  // leaves room for a few. An element may lie further out.
  const double whole = 1.5 * tolerance.scale * (u + sum);
  return {.whole = whole * whole / 2,
          .relative = 4 * tolerance.scale * u,
          .absolute = 8 * tolerance.scale * sum};
}

template <class T, class R>
testing::AssertionResult Close(View<const T> got, View<const R> expected,
                               const Tolerance& tolerance) {
  if (!(got.shape == expected.shape)) {
    return testing::AssertionFailure()
           << "[shape] got " << to_string(got.shape) << ", expected "
           << to_string(expected.shape);
  }
  const int64_t n = got.elements();
  if (n == 0) return testing::AssertionSuccess();
  const Bounds bound = bounds(dtype_of<T>(), dtype_of<R>(), tolerance);
  const std::vector<double> scales = row_scales(expected);
  const int64_t length = got.rank() > 0 ? got.size(-1) : 1;
  Violations kind, element;
  double difference = 0, size = 0;
  int64_t i = 0;
  for_each(got.shape, got.strides, expected.strides,
           [&](const Shape& index, int64_t at_x, int64_t at_y) {
             const double x = as_double(got.data[at_x]);
             const double y = as_double(expected.data[at_y]);
             const double row = scales[i++ / length];
             if (!same_kind(x, y)) return kind.add(1, index, x, y);
             if (!std::isfinite(y)) return;
             const double error = std::abs(x - y);
             const double allowed =
                 bound.absolute * row + bound.relative * std::abs(y);
             if (error > allowed) element.add(error / allowed, index, x, y);
             // |x - y|^2 / (|x|^2 + |y|^2) is 1 - 2<x,y> / (<x,x> + <y,y>)
             // without its cancellation.
             difference += error * error;
             size += x * x + y * y;
           });
  if (kind.count > 0) return kind.report("inf/nan positions", n);
  if (element.count > 0) return element.report("element", n);
  if (difference > bound.whole * size) {
    return testing::AssertionFailure()
           << "[whole] 1 - 2<x,y> / (<x,x> + <y,y>) is " << difference / size
           << ", allowed " << bound.whole;
  }
  return testing::AssertionSuccess();
}

template <class T>
testing::AssertionResult Bitwise(View<const T> got, View<const T> expected) {
  if (!(got.shape == expected.shape)) {
    return testing::AssertionFailure()
           << "[shape] got " << to_string(got.shape) << ", expected "
           << to_string(expected.shape);
  }
  Violations different;
  for_each(
      got.shape, got.strides, expected.strides,
      [&](const Shape& index, int64_t at_x, int64_t at_y) {
        const T &x = got.data[at_x], &y = expected.data[at_y];
        if (std::memcmp(&x, &y, sizeof(T)) != 0 && different.count++ == 0) {
          different.index = index;
          different.got = as_double(x);
          different.expected = as_double(y);
        }
      });
  if (different.count == 0) return testing::AssertionSuccess();
  std::ostringstream out;
  out.precision(17);
  out << "[bitwise] " << different.count << " of " << got.elements()
      << " elements differ, first at " << different.index << ": got "
      << different.got << ", expected " << different.expected;
  return testing::AssertionFailure() << out.str();
}

#define TAPELINE_CLOSE(T, R)                                            \
  template testing::AssertionResult Close(View<const T>, View<const R>, \
                                          const Tolerance&);
TAPELINE_CLOSE(float, float)
TAPELINE_CLOSE(float, double)
TAPELINE_CLOSE(bf16, float)
TAPELINE_CLOSE(bf16, double)
TAPELINE_CLOSE(double, float)
TAPELINE_CLOSE(double, double)
#undef TAPELINE_CLOSE

#define TAPELINE_BITWISE(T) \
  template testing::AssertionResult Bitwise(View<const T>, View<const T>);
TAPELINE_BITWISE(float)
TAPELINE_BITWISE(bf16)
TAPELINE_BITWISE(double)
TAPELINE_BITWISE(int32_t)
TAPELINE_BITWISE(int64_t)
TAPELINE_BITWISE(uint8_t)
#undef TAPELINE_BITWISE

}  // namespace tapeline
