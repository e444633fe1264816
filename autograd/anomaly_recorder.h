// The tape's side of anomaly mode.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "runtime/tensor.h"

namespace tapeline {

class AnomalyScope;

namespace internal {

inline constinit thread_local AnomalyScope* anomaly_scope = nullptr;

// Whether anything is checked.
bool anomaly_on();
// These keep the first non-finite value of a float tensor, if it has one.
void check_finite(const char* op, uint32_t scope, const char* phase, int index,
                  const Tensor& tensor);
// Of an op that ran now.
void check_outputs(const char* op, absl::Span<Tensor* const> outputs);
// Of the sums of weight gradients that were noted since the last call.
void note_sum(const Tensor& sum);
void check_sums(const char* op, uint32_t scope);

}  // namespace internal
}  // namespace tapeline
