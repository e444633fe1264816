// What every kernel shares: where it runs, and how its cost is stated.
//
// A kernel takes views and writes views; the caller gives outputs and
// workspace. It allocates nothing, knows no tape and never fails: shapes are
// checked (CHECK) and the caller owns every byte. Results do not depend on the
// number of threads.
#pragma once

#include <cstdint>

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
};

inline Launch launch() {
  Device& device = Device::current();
  return {&device.compute(), &device.threads()};
}

// Work of one call, for rates and rooflines: bytes are the least that must be
// read and written once.
struct Cost {
  double flops = 0;
  double bytes = 0;
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace tapeline
