// AdamW of one tensor: kernels/adamw on tensors, with its two moments.
//
// Arithmetic and rounding are those of kernels/adamw/adamw.h. Values are fp32
// masters (fp64 beside fp64). Weight decay is decoupled and touches only
// tensors that the caller says decay.
#pragma once

#include <cstdint>

#include "runtime/tensor.h"
#include "runtime/view.h"

namespace tapeline {

struct AdamWRule {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;
};

// What an update needs besides the tensor.
struct UpdateStep {
  double lr = 0;
  double gradient_scale = 1;  // the clip factor
  int64_t count = 1;          // updates so far, this one included
  bool decays = true;
  // The clip factor where the host does not know it (kernels/adamw/adamw.h).
  View<const double> clip_1 = {};
};

// param, grad, m, v: contiguous, of equal shape and one dtype, f32 or f64.
void adamw_update(const AdamWRule& rule, const UpdateStep& step,
                  const Tensor& param, const Tensor& grad, const Tensor& m,
                  const Tensor& v);

}  // namespace tapeline
