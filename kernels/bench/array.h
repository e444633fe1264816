// Values where a benchmark's launches run, and what the host looks at of them.
//
// Memory is the current device's, of its pool. On the CPU the host reads the
// values themselves; of a GPU's it keeps a copy, page by page as it asks, which
// is forgotten when the device's side is handed out for writing: so a check
// that samples rows moves those rows and no more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/device.h"
#include "runtime/pool.h"
#include "runtime/view.h"

namespace tapeline::bench {

class Bytes {
 public:
  explicit Bytes(size_t size);  // zeros
  Bytes(const Bytes& other);
  Bytes(Bytes&& other) noexcept;
  Bytes& operator=(Bytes other) noexcept;
  ~Bytes();

  size_t size() const { return size_; }
  std::byte* data();
  const std::byte* data() const { return block_.data; }
  void upload(const void* from);
  void zero();
  // Bytes [begin, end) as they are when all that was launched has run.
  const std::byte* host(size_t begin, size_t end) const;

 private:
  Device* device_;
  Block block_;
  size_t size_;
  mutable std::unique_ptr<std::byte[]> host_;
  mutable std::vector<bool> here_;  // pages of host_ that are up to date
};

template <class T>
class Array {
 public:
  Array() : Array(0) {}
  explicit Array(int64_t n) : bytes_(static_cast<size_t>(n) * sizeof(T)) {}
  explicit Array(const std::vector<T>& values)
      : Array(static_cast<int64_t>(values.size())) {
    bytes_.upload(values.data());
  }

  int64_t size() const {
    return static_cast<int64_t>(bytes_.size() / sizeof(T));
  }
  T* data() { return reinterpret_cast<T*>(bytes_.data()); }
  const T* data() const { return reinterpret_cast<const T*>(bytes_.data()); }
  void zero() { bytes_.zero(); }  // where they are

  // On the host: one value, and n from the i-th on.
  T operator[](int64_t i) const { return *host(i, 1); }
  const T* host(int64_t i, int64_t n) const {
    const size_t begin = static_cast<size_t>(i) * sizeof(T);
    return reinterpret_cast<const T*>(
        bytes_.host(begin, begin + static_cast<size_t>(n) * sizeof(T)));
  }
  View<const T> row(int64_t i, int64_t n) const { return {host(i, n), {n}}; }

 private:
  Bytes bytes_;
};

// Standard normal values on the bf16 grid, the same for the same seed and set
// of inputs.
template <class T>
Array<T> normal(int64_t n, uint32_t seed);

// The set that normal() draws from now on: launches that are timed one after
// the other read different values.
void use_set(int set);

}  // namespace tapeline::bench

namespace tapeline {

template <class T>
View<T> view_of(bench::Array<T>& values, const Shape& shape) {
  CHECK_EQ(values.size(), shape.elements());
  return {values.data(), shape};
}
template <class T>
View<const T> view_of(const bench::Array<T>& values, const Shape& shape) {
  CHECK_EQ(values.size(), shape.elements());
  return {values.data(), shape};
}

}  // namespace tapeline
