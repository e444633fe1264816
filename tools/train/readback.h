// Numbers of a step on their way from the device to the host, which does not
// wait for them: they are copied into pinned memory in the order of the compute
// stream, and read when that has got there.
//
//   Readback numbers(pool);   // of pinned memory, apart from what is offloaded
//   const size_t loss = numbers.add(loss_1);
//   numbers.send();
//   ...                      // queue more work
//   numbers.wait();          // without a call that blocks the device's streams
//   numbers.values<float>(loss)
//
// On a CPU, where everything queued is done, tensors are read in place. One
// thread; pool and device outlive it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/device.h"
#include "runtime/pool.h"
#include "runtime/tensor.h"

namespace tapeline {

class Readback {
 public:
  explicit Readback(Pool& pool) : device_(&Device::current()), pool_(&pool) {}
  ~Readback();
  Readback(const Readback&) = delete;
  Readback& operator=(const Readback&) = delete;

  // A contiguous tensor; returns its number.
  size_t add(const Tensor& tensor);
  // Once, after the last add(): what is queued from now on may overwrite or
  // free the tensors.
  void send();
  // Until send()'s copies have completed. Looks again and again, with pauses.
  void wait() const;

  // Of tensor `i`, after wait().
  template <class T>
  std::vector<T> values(size_t i) const {
    const Entry& entry = entries_[i];
    if (!pinned()) return entry.tensor.to_vector<T>();
    CHECK(dtype_of<T>() == entry.dtype) << "[readback] " << entry.dtype;
    std::vector<T> out(static_cast<size_t>(entry.elements));
    if (!device_->dry()) copy_out(entry, out.data());
    return out;
  }
  // The only element, of f32 or f64.
  double number(size_t i) const;

 private:
  struct Entry {
    Tensor tensor;  // until it is sent
    DType dtype;
    int64_t elements;
    size_t at;  // bytes into the block
  };
  bool pinned() const { return device_->kind() == DeviceKind::kCuda; }
  void copy_out(const Entry& entry, void* to) const;

  Device* device_;
  Pool* pool_;
  std::vector<Entry> entries_;
  size_t bytes_ = 0;
  Block block_;
  Event sent_;
};

}  // namespace tapeline
