#include "runtime/stream.h"

#include <algorithm>
#include <cstring>

namespace tapeline {
namespace {

// Calls f with a pointer to an unsigned integer of `size` bytes.
template <class F>
void with_word(size_t size, F f) {
  switch (size) {
    case 1:
      return f(static_cast<uint8_t*>(nullptr));
    case 2:
      return f(static_cast<uint16_t*>(nullptr));
    case 4:
      return f(static_cast<uint32_t*>(nullptr));
    default:
      CHECK_EQ(size, 8u) << "an element of " << size << " bytes";
      return f(static_cast<uint64_t*>(nullptr));
  }
}

// Returns the end of what it wrote.
template <class W>
W* gather_words(W* to, const W* from, const Shape& shape, const Shape& strides,
                int dim) {
  if (dim == shape.rank()) {
    *to = *from;
    return to + 1;
  }
  for (int64_t i = 0; i < shape[dim]; ++i) {
    to = gather_words(to, from + i * strides[dim], shape, strides, dim + 1);
  }
  return to;
}

}  // namespace

void Stream::upload(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

void Stream::download(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

void Stream::fill(void* to, const void* element, size_t size, int64_t count) {
  with_word(size, [&]<class W>(W*) {
    W word;
    std::memcpy(&word, element, sizeof(W));
    std::fill_n(static_cast<W*>(to), count, word);
  });
}

void Stream::gather(void* to, const void* from, size_t size, const Shape& shape,
                    const Shape& strides) {
  if (is_contiguous(shape, strides)) {
    const size_t bytes = static_cast<size_t>(shape.elements()) * size;
    if (bytes > 0) std::memcpy(to, from, bytes);
    return;
  }
  with_word(size, [&]<class W>(W*) {
    gather_words(static_cast<W*>(to), static_cast<const W*>(from), shape,
                 strides, 0);
  });
}

void CpuStream::copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && !dry_) std::memcpy(to, from, bytes);
}

void CpuStream::wait(const Event& event) {
  if (event.done()) return;
  // The caller's own thread executes CPU work, so waiting means finishing the
  // other stream here.
  const_cast<Stream*>(event.stream)->synchronize(event);
}

}  // namespace tapeline
