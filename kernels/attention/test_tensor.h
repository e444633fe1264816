// Memory for kernel tests: a tensor of any rank, with a gap behind every row
// and poison in every element that nobody wrote.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/testing/rows.h"
#include "runtime/dtype.h"
#include "runtime/view.h"

namespace tapeline {

template <class T>
bool is_poison(const T& x) {
  const T p = poison<T>();
  return std::memcmp(&x, &p, sizeof(T)) == 0;
}

template <class T>
class TestTensor {
 public:
  // All but the last dimension are spread: rows of the last dimension are `gap`
  // elements apart, slices of the first another `gap`.
  explicit TestTensor(const Shape& shape, int64_t gap = 0) {
    Shape strides = shape;
    int64_t step = 1;
    for (int d = shape.rank() - 1; d >= 0; --d) {
      strides[d] = step;
      step = step * shape[d] + gap;
    }
    memory_.assign(step + 1, poison<T>());
    view_ = View<T>(memory_.data(), shape, strides);
  }
  TestTensor(TestTensor&&) = default;

  const View<T>& view() const { return view_; }
  operator View<T>() const { return view_; }
  operator View<const T>() const { return view_; }

  // f(element) in row-major order.
  template <class F>
  void for_each(F f) const {
    const Shape& n = view_.shape;
    Shape index = n;
    for (int d = 0; d < n.rank(); ++d) index[d] = 0;
    for (int64_t i = 0; i < n.elements(); ++i) {
      int64_t at = 0;
      for (int d = 0; d < n.rank(); ++d) at += index[d] * view_.strides[d];
      f(view_.data[at]);
      for (int d = n.rank() - 1; d >= 0 && ++index[d] == n[d]; --d) {
        index[d] = 0;
      }
    }
  }

  TestTensor& normal(uint32_t seed, double scale = 1) {
    std::mt19937 engine(seed);
    std::normal_distribution<double> distribution(0, scale);
    for_each([&](T& x) { x = T(distribution(engine)); });
    return *this;
  }
  TestTensor& assign(const std::vector<double>& values) {
    size_t i = 0;
    for_each([&](T& x) { x = T(values[i++]); });
    return *this;
  }
  std::vector<double> values() const {
    std::vector<double> out;
    for_each([&](T x) { out.push_back(static_cast<double>(x)); });
    return out;
  }
  std::vector<T> elements() const {
    std::vector<T> out;
    for_each([&](T x) { out.push_back(x); });
    return out;
  }
  // Whether everything outside the view is as it was.
  bool gaps_untouched() const {
    int64_t left = 0;
    for (const T& x : memory_) left += is_poison(x);
    int64_t inside = 0;
    for_each([&](T x) { inside += is_poison(x); });
    return left - inside ==
           static_cast<int64_t>(memory_.size()) - view_.elements();
  }

 private:
  std::vector<T> memory_;
  View<T> view_;
};

}  // namespace tapeline
