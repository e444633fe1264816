// Tensor: a small copyable handle on a Storage.
//
// Copies and views share the storage; nothing here computes. Shapes have at
// most four dimensions; strides are in elements. `requires_grad`, `tape` and
// `slot` say where the value was made on a tape (autograd/tape.h): the tape
// sets them, copies carry them.
// Bytes are read and written through access.h. An undefined Tensor() holds
// nothing and converts to false. Not thread-safe per handle.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "runtime/dtype.h"
#include "runtime/shape.h"
#include "runtime/storage.h"
#include "runtime/view.h"

namespace tapeline {

// Where on a tape a value was made; 0: on no tape.
struct TapePosition {
  uint64_t tape = 0;
  uint32_t slot = 0;
  bool requires_grad = false;
  auto operator<=>(const TapePosition&) const = default;
};

class Tensor : public TapePosition {
 public:
  Tensor() = default;
  // Unwritten bytes on the current device.
  static Tensor empty(const Shape& shape, DType dtype,
                      Tag tag = Tag::kActivation);
  static Tensor zeros(const Shape& shape, DType dtype,
                      Tag tag = Tag::kActivation) {
    return full(shape, dtype, 0, tag);
  }
  static Tensor full(const Shape& shape, DType dtype, double value,
                     Tag tag = Tag::kActivation);
  // A copy of host values; their count must equal the shape's.
  template <class T>
  static Tensor from(const std::vector<T>& values, const Shape& shape,
                     Tag tag = Tag::kActivation) {
    Tensor t = empty(shape, dtype_of<T>(), tag);
    t.assign(values);
    return t;
  }

  explicit operator bool() const { return static_cast<bool>(storage_); }
  const StoragePtr& storage() const { return storage_; }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  const Shape& strides() const { return strides_; }
  int64_t offset() const { return offset_; }  // elements
  int rank() const { return shape_.rank(); }
  int64_t size(int i) const { return shape_[i]; }
  int64_t elements() const { return shape_.elements(); }
  int64_t bytes() const {
    return elements() * static_cast<int64_t>(size_of(dtype_));
  }
  bool contiguous() const { return is_contiguous(shape_, strides_); }

  // Views of the same bytes. They carry no tape position: ops.h has the
  // differentiable forms.
  Tensor view_as(const Shape& shape) const;  // contiguous tensors only
  Tensor slice(int dim, int64_t begin, int64_t end) const;
  Tensor transpose(int a, int b) const;
  // A new dimension at `dim` whose `size` entries are the same bytes (stride
  // 0): for reading only.
  Tensor broadcast_dim(int dim, int64_t size) const;
  // Another handle on the same bytes, off the tape.
  Tensor detach() const;

  // Waits for the bytes and copies them out, whatever the strides.
  template <class T>
  std::vector<T> to_vector() const {
    std::vector<T> out(static_cast<size_t>(elements()));
    copy_to(out.data(), dtype_of<T>());
    return out;
  }
  // Overwrites the elements of a contiguous tensor; counts as a write.
  void fill(double value) const;
  void set_zero() const { fill(0); }
  // The same with host values, which may change on return.
  template <class T>
  void assign(const std::vector<T>& values) const {
    CHECK_EQ(static_cast<int64_t>(values.size()), elements());
    copy_from(values.data(), dtype_of<T>());
  }
  // A contiguous copy on the current device, off the tape.
  Tensor clone(Tag tag = Tag::kActivation) const;

  bool operator==(const Tensor&) const = delete;  // of what?

  // Copies carry it.
  TapePosition& position() { return *this; }
  const TapePosition& position() const { return *this; }

 private:
  void copy_from(const void* values, DType given) const;
  void copy_to(void* values, DType wanted) const;
  bool dry() const { return storage_->device().dry(); }
  static Stream& stream() { return Device::current().compute(); }

  StoragePtr storage_;
  int64_t offset_ = 0;
  Shape shape_;
  [[no_unique_address]] Shape strides_;  // dtype_ lies in its padding
  DType dtype_ = DType::kF32;
};

// bf16[4096, 2048]
std::ostream& operator<<(std::ostream& out, const Tensor& tensor);
std::string describe(const Tensor& tensor);

}  // namespace tapeline
