#include "runtime/tensor.h"

#include <memory>

#include "runtime/access.h"

namespace tapeline {

Tensor Tensor::empty(const Shape& shape, DType dtype, Tag tag) {
  Tensor t;
  for (int64_t d : shape) CHECK_GE(d, 0) << "negative extent in " << shape;
  const size_t bytes = static_cast<size_t>(shape.elements()) * size_of(dtype);
  t.storage_ = std::make_shared<Storage>(Device::current(), bytes, tag);
  t.shape_ = shape;
  t.strides_ = contiguous_strides(shape);
  t.dtype_ = dtype;
  return t;
}

Tensor Tensor::full(const Shape& shape, DType dtype, double value, Tag tag) {
  Tensor t = empty(shape, dtype, tag);
  t.fill(value);
  return t;
}

void Tensor::copy_from(const void* values, DType given) const {
  CHECK(contiguous()) << "[assign] to a strided " << *this;
  dispatch(given, [&]<class T>() {
    const auto out = write<T>(*this);
    if (!dry()) stream().upload(out.view().data, values, bytes());
  });
}

void Tensor::copy_to(void* values, DType wanted) const {
  if (!contiguous()) return clone().copy_to(values, wanted);
  dispatch(wanted, [&]<class T>() {
    const auto in = read<T>(*this);
    if (dry()) return;
    stream().synchronize(storage_->ready());
    stream().download(values, in.view().data, bytes());
  });
}

void Tensor::fill(double value) const {
  CHECK(contiguous()) << "[fill] of a strided " << *this;
  dispatch(dtype_, [&]<class T>() {
    const auto out = write<T>(*this);
    const T element(value);
    if (!dry()) stream().fill(out.view().data, &element, sizeof(T), elements());
  });
}

Tensor Tensor::clone(Tag tag) const {
  Tensor t = empty(shape_, dtype_, tag);
  dispatch(dtype_, [&]<class T>() {
    const auto in = read<T>(*this);
    const auto out = write<T>(t);
    if (dry()) return;
    stream().gather(out.view().data, in.view().data, sizeof(T), shape_,
                    strides_);
  });
  return t;
}

Tensor Tensor::detach() const {
  Tensor t = *this;
  t.position() = {};
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
  CHECK(-rank() <= dim && dim < rank() && 0 <= begin && begin <= end &&
        end <= size(dim))
      << "[slice] [" << begin << ", " << end << ") of dimension " << dim
      << " of " << *this;
  Tensor t = detach();
  t.offset_ += begin * strides_[dim];
  t.shape_[dim] = end - begin;
  return t;
}

Tensor Tensor::transpose(int a, int b) const {
  CHECK(-rank() <= a && a < rank() && -rank() <= b && b < rank())
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
  t.shape_.push_back(size);
  t.strides_.push_back(0);
  for (int d = rank(); d > dim; --d) t = t.transpose(d - 1, d);
  return t;
}

std::string describe(const Tensor& tensor) {
  if (!tensor) return "undefined";
  return std::string(name_of(tensor.dtype())) + to_string(tensor.shape());
}

std::ostream& operator<<(std::ostream& out, const Tensor& tensor) {
  return out << describe(tensor);
}

}  // namespace tapeline
