// The tape's side of anomaly mode.
#pragma once

#include <cstdint>

#include "runtime/tensor.h"

namespace tapeline::internal {

bool anomaly_on();
// Keeps the first non-finite value of a float tensor, if it has one.
void check_finite(const char* op, uint32_t scope, const char* phase, int index,
                  const Tensor& tensor);

}  // namespace tapeline::internal
