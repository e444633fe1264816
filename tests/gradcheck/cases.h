// Functions of ops whose gradients are checked: odd sizes, one token, strided
// inputs, and what each op has of corners.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "autograd/gradcheck.h"
#include "autograd/ops.h"
#include "runtime/parameter.h"
#include "runtime/tensor.h"

namespace tapeline {

struct OpCase {
  std::string op;    // as declared in ops.h
  std::string what;  // a name in CamelCase
  GradcheckCase check;
  // False where some gradients are exact zeros: nothing to scale.
  bool has_gradient = true;
};
using OpCases = std::vector<OpCase>;

OpCases arithmetic_cases();
OpCases shape_cases();
OpCases dense_cases();
OpCases attention_op_cases();
OpCases dsa_cases();
OpCases moe_cases();
OpCases loss_cases();
OpCases model_cases();

// --- What cases are made of: f64, the same values for the same seed

using Tensors = std::vector<Tensor>;

Tensor normal(const Shape& shape, uint32_t seed, double scale = 1);
// The middle of a tensor that is wider in its last dimension and longer in its
// first; what lies around is NaN.
Tensor strided(const Shape& shape, uint32_t seed, double scale = 1);
// Rank 2, columns side by side.
Tensor transposed(const Shape& shape, uint32_t seed);
Parameter weight(const Shape& shape, uint32_t seed, double scale = 1);
Tensor ints(const std::vector<int32_t>& values, const Shape& shape);

}  // namespace tapeline
