// A GPU that is never idle, and a comparison that moves no bytes to the host.
#pragma once

#include <cstdint>
#include <memory>

#include "runtime/tensor.h"

namespace tapeline {

// Until destroyed, another thread launches one kernel after the other on a
// stream of its own: they compute and move bytes on every processor, for times
// that vary, so that the blocks of a kernel beside them run in ever other
// orders and places.
class BusyGpu {
 public:
  BusyGpu();
  ~BusyGpu();
  // Kernels that have run.
  int64_t runs() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The number of bytes in which two contiguous tensors differ.
int64_t differing_bytes(const Tensor& a, const Tensor& b);

}  // namespace tapeline
