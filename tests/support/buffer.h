// A tensor's elements for a kernel test: poisoned, strided, guarded.
//
//   Buffer<float> y({4, 100}, /*gap=*/3);      // NaN until a kernel writes it
//   kernel(launch(), x.view(), y.view());
//   EXPECT_TRUE(y.guards_intact());            // nothing beside it was written
//
// Elements of the last dimension lie side by side; rows are `gap` elements
// apart, and guards stand in the gaps and at both ends. Every element starts as
// NaN (a huge number in i32), so an output that was not written, or a guard
// that was read, shows in the result.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "runtime/dtype.h"
#include "runtime/view.h"

namespace tapeline {

template <class T>
class Buffer {
 public:
  explicit Buffer(const Shape& shape, int64_t gap = 0)
      : shape_(shape), strides_(shape) {
    int64_t step = 1;
    for (int d = shape.rank() - 1; d >= 0; --d) {
      strides_[d] = step;
      step *= shape[d];
      if (d == shape.rank() - 1) step += gap;
    }
    data_.resize(static_cast<size_t>(step + 2 * kGuard));
    poison();
  }

  View<T> view() { return {data_.data() + kGuard, shape_, strides_}; }
  View<const T> view() const {
    return {data_.data() + kGuard, shape_, strides_};
  }
  // For parameters declared View<const T>, which deduce no conversion.
  View<const T> in() const { return view(); }

  void poison() {
    for (T& element : data_) element = poison_element();
  }

  // Are the elements that belong to no index still poison?
  bool guards_intact() const {
    std::vector<bool> inside(data_.size());
    for_each([&](int64_t at, int64_t) { inside[at] = true; });
    const T poison = poison_element();
    for (size_t i = 0; i < data_.size(); ++i) {
      if (!inside[i] && std::memcmp(&data_[i], &poison, sizeof(T)) != 0) {
        return false;
      }
    }
    return true;
  }

  // The elements in row-major order, exactly.
  std::vector<double> values() const {
    std::vector<double> out(shape_.elements());
    for_each([&](int64_t at, int64_t i) {
      if constexpr (std::is_same_v<T, bf16>)
        out[i] = float{data_[at]};
      else
        out[i] = static_cast<double>(data_[at]);
    });
    return out;
  }
  // Rounded to T.
  void set(const std::vector<double>& values) {
    CHECK_EQ(static_cast<int64_t>(values.size()), shape_.elements());
    for_each([&](int64_t at, int64_t i) {
      if constexpr (std::is_same_v<T, bf16>) {
        data_[at] = bf16(static_cast<float>(values[i]));
      } else {
        data_[at] = static_cast<T>(values[i]);
      }
    });
  }
  // Standard normal values on the bf16 grid: exact in every float dtype.
  Buffer& normal(uint32_t seed, float scale = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<float> draw;
    std::vector<double> values(shape_.elements());
    for (double& v : values) v = float{bf16(scale * draw(random))};
    set(values);
    return *this;
  }

 private:
  static constexpr int64_t kGuard = 16;

  // 0x7fff words: NaN in f32, bf16 and f64, huge in i32 and i64.
  static T poison_element() {
    T element;
    uint8_t bytes[sizeof(T)];
    for (size_t i = 0; i < sizeof(T); ++i) bytes[i] = i % 2 ? 0x7f : 0xff;
    std::memcpy(&element, bytes, sizeof(T));
    return element;
  }

  // f(position in data_, row-major index)
  template <class F>
  void for_each(F f) const {
    const int64_t n = shape_.elements();
    for (int64_t i = 0; i < n; ++i) {
      int64_t at = kGuard, rest = i;
      for (int d = shape_.rank() - 1; d >= 0; --d) {
        at += rest % shape_[d] * strides_[d];
        rest /= shape_[d];
      }
      f(at, i);
    }
  }

  Shape shape_, strides_;
  std::vector<T> data_;
};

}  // namespace tapeline
