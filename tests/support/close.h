// How near a result must be to what was expected: the one place for tolerances.
//
//   EXPECT_TRUE(Close(got, expected, {.sum_length = k}));
//   EXPECT_TRUE(Bitwise(got, again));
//
// Close() applies two rules, both in f64, after requiring that infinities and
// NaNs stand at the same positions with the same sign:
//   whole    1 - 2<x,y> / (<x,x> + <y,y>) within a bound: half the squared
//            relative error, so it finds what is wrong everywhere or in a tile
//   element  |x - y| <= absolute + relative |y|, where absolute is a fraction
//   of
//            the root mean square of y's row: so it finds one wrong element
// Bounds follow from the dtype T of the result, whose rounding step is u, and
// from the number n of terms added per element in Accumulator<T>, whose step is
// u_acc: errors grow like u + sqrt(n) u_acc. An expectation held in float
// counts with its own rounding.
#pragma once

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/dtype.h"
#include "runtime/view.h"

namespace tapeline {

struct Tolerance {
  // Terms in the longest sum, or operations in the longest chain, behind one
  // element.
  int64_t sum_length = 1;
  // For what passes through several roundings to T on its way (a bf16 network,
  // say): multiplies the element bound; the whole bound by its square.
  double scale = 1;
};

// The bounds that Close() derives from the dtype and a Tolerance.
struct Bounds {
  double whole;     // of 1 - 2<x,y> / (<x,x> + <y,y>)
  double relative;  // of |x - y| / |y|
  double absolute;  // of |x - y| / rms(row of y)
};
Bounds bounds(DType got, DType expected, const Tolerance& tolerance);

// T in {float, bf16, double}, R in {float, double}. Any rank, any strides; both
// must have the same shape. A failure names the rule, the worst element's index
// and both values.
template <class T, class R>
testing::AssertionResult Close(View<const T> got, View<const R> expected,
                               const Tolerance& tolerance = {});

// Same bits everywhere: 0 and -0 differ, equal NaNs do not.
template <class T>
testing::AssertionResult Bitwise(View<const T> got, View<const T> expected);

// The same for contiguous vectors, and for views of non-const elements.
template <class T, class R>
testing::AssertionResult Close(const std::vector<T>& got,
                               const std::vector<R>& expected,
                               const Tolerance& tolerance = {}) {
  const Shape a{static_cast<int64_t>(got.size())};
  const Shape b{static_cast<int64_t>(expected.size())};
  return Close(View<const T>(got.data(), a), View<const R>(expected.data(), b),
               tolerance);
}
template <class T, class R>
testing::AssertionResult Close(
    View<T> got, View<R> expected,
    const Tolerance& tolerance = {}) requires(!std::is_const_v<T> ||
                                              !std::is_const_v<R>) {
  return Close(View<const T>(got), View<const R>(expected), tolerance);
}
template <class T>
testing::AssertionResult Bitwise(const std::vector<T>& got,
                                 const std::vector<T>& expected) {
  const Shape a{static_cast<int64_t>(got.size())};
  const Shape b{static_cast<int64_t>(expected.size())};
  return Bitwise(View<const T>(got.data(), a),
                 View<const T>(expected.data(), b));
}

}  // namespace tapeline
