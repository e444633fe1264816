// Gradients by central differences in f64: the oracle of backward kernels.
#pragma once

#include <functional>
#include <vector>

#include "tests/support/buffer.h"
#include "tests/support/close.h"

namespace tapeline {

// d loss / d x for every element of x. With values near 1 the error is about
// 1e-10, far below the rounding of float, which the result is given in so that
// Close() allows for it.
inline std::vector<float> numeric_gradient(Buffer<double>& x,
                                           const std::function<double()>& loss,
                                           double step = 1e-5) {
  const std::vector<double> at = x.values();
  std::vector<double> moved = at;
  std::vector<float> gradient;
  for (size_t i = 0; i < at.size(); ++i) {
    moved[i] = at[i] + step;
    x.set(moved);
    const double above = loss();
    moved[i] = at[i] - step;
    x.set(moved);
    const double below = loss();
    moved[i] = at[i];
    gradient.push_back(static_cast<float>((above - below) / (2 * step)));
  }
  x.set(at);
  return gradient;
}

// The sum of all products of two tensors' elements: a loss whose gradient with
// respect to y is dy.
inline double inner_product(const Buffer<double>& y, const Buffer<double>& dy) {
  const std::vector<double> a = y.values(), b = dy.values();
  double total = 0;
  for (size_t i = 0; i < a.size(); ++i) total += a[i] * b[i];
  return total;
}

}  // namespace tapeline
