// View<T>: typed, strided access to bytes somebody else owns.
//
// Strides are in elements. A view never owns and never outlives its lease
// (access.h); kernels take views by value. View<T> converts to View<const T>.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "runtime/shape.h"

namespace tapeline {

template <class T>
struct View {
  T* data = nullptr;
  Shape shape;
  Shape strides;

  View() = default;
  View(T* pointer, const Shape& extents)
      : data(pointer), shape(extents), strides(contiguous_strides(extents)) {}
  View(T* pointer, const Shape& extents, const Shape& steps)
      : data(pointer), shape(extents), strides(steps) {}

  operator View<const T>() const requires(!std::is_const_v<T>) {
    return {data, shape, strides};
  }

  int rank() const { return shape.rank(); }
  int64_t size(int i) const { return shape[i]; }
  int64_t elements() const { return shape.elements(); }
  bool contiguous() const { return is_contiguous(shape, strides); }
  explicit operator bool() const { return data != nullptr; }

  T& operator()(int64_t i) const { return data[i * strides[0]]; }
  T& operator()(int64_t i, int64_t j) const {
    return data[i * strides[0] + j * strides[1]];
  }
  T& operator()(int64_t i, int64_t j, int64_t k) const {
    return data[i * strides[0] + j * strides[1] + k * strides[2]];
  }

  // The i-th slice along the first dimension.
  View operator[](int64_t i) const {
    Shape extents, steps;
    for (int d = 1; d < rank(); ++d) {
      extents.push_back(shape[d]);
      steps.push_back(strides[d]);
    }
    return {data + i * strides[0], extents, steps};
  }
  // Rows [begin, end) of dimension d.
  View slice(int d, int64_t begin, int64_t end) const {
    View out = *this;
    if (d < 0) d += rank();
    out.data += begin * strides[d];
    out.shape[d] = end - begin;
    return out;
  }
  // Dimensions a and b exchanged.
  View transpose(int a, int b) const {
    View out = *this;
    std::swap(out.shape[a], out.shape[b]);
    std::swap(out.strides[a], out.strides[b]);
    return out;
  }
};

// A contiguous view of a vector, for tests and host-side tables.
template <class T>
View<T> view_of(std::vector<T>& values, const Shape& shape) {
  CHECK_EQ(static_cast<int64_t>(values.size()), shape.elements());
  return {values.data(), shape};
}
template <class T>
View<const T> view_of(const std::vector<T>& values, const Shape& shape) {
  CHECK_EQ(static_cast<int64_t>(values.size()), shape.elements());
  return {values.data(), shape};
}

}  // namespace tapeline
