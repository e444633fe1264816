// Typed access to a tensor's bytes under a lease.
//
//   kernel(launch(), read<float>(x), write<float>(y));
//
// read() and write() make the bytes resident, hold a lease until the end of the
// full expression (or of the returned object's scope) and convert to a View.
// write() bumps the storage's version: a tensor saved for backward and then
// written is found out when it is unpacked.
#pragma once

#include <type_traits>

#include "runtime/device.h"
#include "runtime/tensor.h"
#include "runtime/view.h"

namespace tapeline {

template <class T>
class Leased {
 public:
  Leased(const Tensor& tensor, Stream& stream) : stream_(&stream) {
    CHECK(tensor) << "an undefined tensor has no bytes";
    CHECK(tensor.dtype() == dtype_of<T>())
        << "wanted " << dtype_of<T>() << ", got " << describe(tensor);
    storage_ = tensor.storage();
    std::byte* bytes = storage_->acquire(stream, !std::is_const_v<T>);
    view_ = View<T>(reinterpret_cast<T*>(bytes) + tensor.offset(),
                    tensor.shape(), tensor.strides());
  }
  ~Leased() { storage_->release(*stream_, !std::is_const_v<T>); }
  Leased(const Leased&) = delete;
  Leased& operator=(const Leased&) = delete;

  const View<T>& view() const { return view_; }
  operator const View<T>&() const { return view_; }
  operator View<const T>() const requires(!std::is_const_v<T>) { return view_; }

 private:
  StoragePtr storage_;
  View<T> view_;
  Stream* stream_;
};

template <class T>
Leased<const T> read(const Tensor& tensor) {
  return Leased<const T>(tensor, Device::current().compute());
}

template <class T>
Leased<T> write(const Tensor& tensor) {
  CHECK(tensor) << "an undefined tensor has no bytes";
  tensor.storage()->bump_version();
  return Leased<T>(tensor, Device::current().compute());
}

}  // namespace tapeline
