// What every kernel shares: where it runs, and how its cost is stated.
//
// A kernel takes views and writes views; the caller gives outputs and
// workspace. It allocates nothing, knows no tape and never fails: shapes are
// checked (CHECK) and the caller owns every byte. Results do not depend on the
// number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <type_traits>

#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/dtype.h"
#include "runtime/stream.h"
#include "runtime/thread_pool.h"
#include "runtime/view.h"

namespace tapeline {

// Where a kernel's work is queued and, on the CPU, who shares it.
struct Launch {
  Stream* stream;
  ThreadPool* threads;
  bool dry = false;  // there are no bytes: every kernel returns at once
  // Of a dry launch, too: a workspace has the size that this side needs.
  DeviceKind kind = DeviceKind::kCpu;

  bool on_cuda() const { return kind == DeviceKind::kCuda; }
};

inline Launch launch() {
  Device& device = Device::current();
  return {&device.compute(), &device.threads(), device.dry(), device.kind()};
}

// Work of one call, for rates and rooflines: bytes are the least that must be
// read and written once.
struct Cost {
  double flops = 0;
  double bytes = 0;
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of one chunk of a parallel loop over rows of `elements`: about 8192
// elements, which take longer than waking a thread does.
constexpr int64_t rows_per_chunk(int64_t elements) {
  return std::max<int64_t>(1, 8192 / std::max<int64_t>(1, elements));
}

// Columns of one chunk where a thread owns columns and walks all rows, so that
// each column's sum has one order: eight chunks when D allows. Narrower than
// 32, a chunk would waste cache lines; wider than 256, its sums would leave L1.
inline constexpr int64_t kMaxColumnsPerChunk = 256;
constexpr int64_t columns_per_chunk(int64_t columns) {
  return std::clamp<int64_t>(columns / 8 / 32 * 32, 32, kMaxColumnsPerChunk);
}

// Elements of a row lie side by side; rows may be any distance apart.
template <class T>
bool dense_rows(const View<T>& x) {
  return x.rank() >= 1 && (x.strides[-1] == 1 || x.size(-1) <= 1);
}

// f32[4096, 128], for messages.
template <class T>
std::string describe(const View<T>& x) {
  std::ostringstream out;
  out << dtype_of<T>() << x.shape;
  if (!x.contiguous()) out << " of strides " << x.strides;
  return out.str();
}

}  // namespace tapeline
