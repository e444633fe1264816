#include "runtime/tensor.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "runtime/access.h"

namespace tapeline {
namespace {

// Calls f(source offset) for every element in row-major order.
template <class F>
void for_each_offset(const Shape& shape, const Shape& strides, F&& f) {
  const int rank = shape.rank();
  const int64_t total = shape.elements();
  Shape index = shape;
  for (int d = 0; d < rank; ++d) index[d] = 0;
  int64_t offset = 0;
  for (int64_t n = 0; n < total; ++n) {
    f(offset);
    for (int d = rank - 1; d >= 0; --d) {
      offset += strides[d];
      if (++index[d] < shape[d]) break;
      offset -= strides[d] * shape[d];
      index[d] = 0;
    }
  }
}

// The host is about to read bytes that a lease has made resident.
void wait_on_host(const Storage& storage) {
  Device::current().compute().synchronize(storage.ready());
}

// For work on the bytes themselves, of which a dry device has none.
template <class F>
void dispatch_any(DType dtype, F&& f) {
  if (Device::current().dry()) return;
  switch (dtype) {
    case DType::kF32:
      return f.template operator()<float>();
    case DType::kBf16:
      return f.template operator()<bf16>();
    case DType::kF64:
      return f.template operator()<double>();
    case DType::kI32:
      return f.template operator()<int32_t>();
    case DType::kI64:
      return f.template operator()<int64_t>();
    case DType::kU8:
      return f.template operator()<uint8_t>();
  }
}

}  // namespace

Tensor Tensor::empty(const Shape& shape, DType dtype, Tag tag) {
  Tensor t;
  for (int64_t d : shape) CHECK_GE(d, 0) << "negative extent in " << shape;
  const size_t bytes = static_cast<size_t>(shape.elements()) * size_of(dtype);
  t.storage_ = StoragePtr(new Storage(Device::current(), bytes, tag));
  t.shape_ = shape;
  t.strides_ = contiguous_strides(shape);
  t.dtype_ = dtype;
  return t;
}

Tensor Tensor::zeros(const Shape& shape, DType dtype, Tag tag) {
  Tensor t = empty(shape, dtype, tag);
  t.set_zero();
  return t;
}

void Tensor::set_zero() const {
  CHECK(contiguous()) << "[set_zero] of a strided " << *this;
  if (bytes() == 0) return;
  Stream& stream = storage_->device().compute();
  std::byte* data = storage_->acquire(stream, /*will_write=*/true);
  if (!storage_->device().dry()) {
    std::memset(data + offset_ * static_cast<int64_t>(size_of(dtype_)), 0,
                static_cast<size_t>(bytes()));
  }
  storage_->bump_version();
  storage_->release(stream, true);
}

Tensor Tensor::full(const Shape& shape, DType dtype, double value, Tag tag) {
  Tensor t = empty(shape, dtype, tag);
  dispatch_any(dtype, [&]<class T>() {
    auto out = write<T>(t);
    T element;
    if constexpr (std::is_same_v<T, bf16>) {
      element = bf16(static_cast<float>(value));
    } else {
      element = static_cast<T>(value);
    }
    std::fill_n(out.view().data, t.elements(), element);
  });
  return t;
}

template <class T>
Tensor Tensor::from(const std::vector<T>& values, const Shape& shape, Tag tag) {
  CHECK_EQ(static_cast<int64_t>(values.size()), shape.elements());
  Tensor t = empty(shape, dtype_of<T>(), tag);
  auto out = write<T>(t);
  if (!t.storage_->device().dry()) {
    std::copy(values.begin(), values.end(), out.view().data);
  }
  return t;
}

template <class T>
std::vector<T> Tensor::to_vector() const {
  auto in = read<T>(*this);
  if (storage_->device().dry()) {
    return std::vector<T>(static_cast<size_t>(elements()));
  }
  wait_on_host(*storage_);
  std::vector<T> out;
  out.reserve(static_cast<size_t>(elements()));
  const T* data = in.view().data;
  for_each_offset(shape_, strides_, [&](int64_t i) { out.push_back(data[i]); });
  return out;
}

Tensor Tensor::clone(Tag tag) const {
  Tensor t = empty(shape_, dtype_, tag);
  dispatch_any(dtype_, [&]<class T>() {
    auto in = read<T>(*this);
    auto out = write<T>(t);
    const T* from = in.view().data;
    T* to = out.view().data;
    if (contiguous()) {
      std::copy_n(from, elements(), to);
    } else {
      for_each_offset(shape_, strides_, [&](int64_t i) { *to++ = from[i]; });
    }
  });
  return t;
}

Tensor Tensor::detach() const {
  Tensor t = *this;
  t.requires_grad = false;
  t.slot = 0;
  t.tape = 0;
  return t;
}

Tensor Tensor::view_as(const Shape& shape) const {
  CHECK_EQ(shape.elements(), elements())
      << "[view] " << *this << " does not hold " << shape;
  CHECK(contiguous()) << "[view] of a strided " << *this << " to " << shape;
  Tensor t = detach();
  t.shape_ = shape;
  t.strides_ = contiguous_strides(shape);
  return t;
}

Tensor Tensor::slice(int dim, int64_t begin, int64_t end) const {
  if (dim < 0) dim += rank();
  CHECK(dim >= 0 && dim < rank() && 0 <= begin && begin <= end &&
        end <= size(dim))
      << "[slice] [" << begin << ", " << end << ") of dimension " << dim
      << " of " << *this;
  Tensor t = detach();
  t.offset_ += begin * strides_[dim];
  t.shape_[dim] = end - begin;
  return t;
}

Tensor Tensor::transpose(int a, int b) const {
  if (a < 0) a += rank();
  if (b < 0) b += rank();
  CHECK(a >= 0 && a < rank() && b >= 0 && b < rank())
      << "[transpose] dimensions " << a << ", " << b << " of " << *this;
  Tensor t = detach();
  std::swap(t.shape_[a], t.shape_[b]);
  std::swap(t.strides_[a], t.strides_[b]);
  return t;
}

Tensor Tensor::broadcast_dim(int dim, int64_t size) const {
  CHECK(dim >= 0 && dim <= rank() && size >= 0)
      << "[broadcast] dimension " << dim << " of " << *this;
  Tensor t = detach();
  t.shape_ = {};
  t.strides_ = {};
  for (int d = 0; d <= rank(); ++d) {
    if (d == dim) {
      t.shape_.push_back(size);
      t.strides_.push_back(0);
    }
    if (d < rank()) {
      t.shape_.push_back(shape_[d]);
      t.strides_.push_back(strides_[d]);
    }
  }
  return t;
}

std::ostream& operator<<(std::ostream& out, const Tensor& tensor) {
  if (!tensor) return out << "undefined";
  return out << tensor.dtype() << tensor.shape();
}

std::string describe(const Tensor& tensor) {
  std::ostringstream out;
  out << tensor;
  return out.str();
}

#define TAPELINE_INSTANTIATE(T)                                              \
  template Tensor Tensor::from<T>(const std::vector<T>&, const Shape&, Tag); \
  template std::vector<T> Tensor::to_vector<T>() const;
TAPELINE_INSTANTIATE(float)
TAPELINE_INSTANTIATE(bf16)
TAPELINE_INSTANTIATE(double)
TAPELINE_INSTANTIATE(int32_t)
TAPELINE_INSTANTIATE(int64_t)
TAPELINE_INSTANTIATE(uint8_t)
#undef TAPELINE_INSTANTIATE

}  // namespace tapeline
