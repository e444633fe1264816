// Shared by the op files: element access, shape checks and output allocation.
#pragma once

#include <initializer_list>

#include "autograd/anomaly_recorder.h"
#include "autograd/checkpoint.h"
#include "autograd/gradients.h"
#include "autograd/tape.h"
#include "kernels/kernel.h"
#include "runtime/access.h"
#include "runtime/status.h"
#include "runtime/tensor.h"

namespace tapeline::internal {

// Bytes for one kernel call.
inline Tensor workspace(size_t bytes) {
  return Tensor::empty({static_cast<int64_t>(bytes)}, DType::kU8,
                       Tag::kWorkspace);
}
inline std::byte* bytes_of(const View<uint8_t>& view) {
  return reinterpret_cast<std::byte*>(view.data);
}

inline Tensor empty_like(const Tensor& x) {
  return Tensor::empty(x.shape(), x.dtype());
}

// For routed rows, of which those from offsets[E] on are never written: anomaly
// mode must not take them for results.
inline Tensor empty_routed(const Shape& shape, DType dtype) {
  return anomaly_on() ? Tensor::zeros(shape, dtype)
                      : Tensor::empty(shape, dtype);
}

inline Shape with_last(Shape shape, int64_t last) {
  shape[-1] = last;
  return shape;
}

inline bool unit_last_stride(const Tensor& x) {
  return x.rank() == 0 || x.size(-1) <= 1 || x.strides()[-1] == 1;
}

// Most kernels want contiguous rows; views made by transposing are copied.
inline Tensor rows_or_copy(const Tensor& x) {
  return unit_last_stride(x) ? x : x.clone();
}

// Kernels that see [.., D] as [N, D] accept any row stride, so only a tensor of
// another rank has to be contiguous.
inline Tensor flat_rows_or_copy(const Tensor& x) {
  if (x.rank() == 2) return rows_or_copy(x);
  return x.contiguous() ? x : x.clone();
}
template <class T>
View<T> flat_rows(const View<T>& x) {
  if (x.rank() == 2) return x;
  const int64_t d = x.size(x.rank() - 1);
  return {x.data, {d == 0 ? 0 : x.elements() / d, d}};
}
inline int64_t flat_row_count(const Tensor& x) {
  const int64_t d = x.size(-1);
  return x.rank() == 2 ? x.size(0) : d == 0 ? 0 : x.elements() / d;
}

// Whether push() will record an op of these, for one whose kernels make its
// gradient along with its output.
inline bool will_record(std::initializer_list<const Tensor*> inputs,
                        std::initializer_list<const Parameter*> parameters) {
  if (op_mode() != GradMode::kOn) return false;
  for (const Tensor* x : inputs) {
    if (x->requires_grad) return true;
  }
  for (const Parameter* p : parameters) {
    if (p->trainable()) return true;
  }
  return false;
}

// A shape rule's result, or the program's end with its message.
inline Shape checked(const absl::StatusOr<Shape>& shape) {
  CHECK_OK(shape.status());
  return *shape;
}

// Operands that compute together have one dtype.
inline void check_dtypes(const char* op, const Tensor& a, const Tensor& b) {
  CHECK(a.dtype() == b.dtype())
      << "[" << op << "] dtypes differ: " << a << " and " << b;
}
// Statistics and weights beside `x` are in its accumulator's dtype.
inline void check_accumulates(const char* op, const Tensor& x,
                              const Tensor& statistic) {
  CHECK(statistic.dtype() == accumulator_dtype(x.dtype()))
      << "[" << op << "] " << statistic << " beside " << x << " is not "
      << accumulator_dtype(x.dtype());
}

// One number seen as every element of `shape`.
template <class T>
View<const T> broadcast(const View<const T>& scalar, const Shape& shape) {
  Shape strides = shape;
  for (int i = 0; i < strides.rank(); ++i) strides[i] = 0;
  return {scalar.data, shape, strides};
}

}  // namespace tapeline::internal
