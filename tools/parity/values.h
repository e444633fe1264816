// Values: what is compared, as f64 in host memory with a name, and how.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "runtime/tensor.h"

namespace tapeline {

// What a tensor is, which decides how far it may be off.
enum class ValueKind : uint8_t {
  kScalar,      // losses and their parts
  kActivation,  // anything of the forward pass
  kGradient,
  kAuxiliary,      // KL and balance losses with all that belongs to them, and
                   // weights after updates
  kExact,          // tokens, labels, counts
  kIdSets,         // ids of keys: equal as sets, row by row
  kExperts,        // ids of experts: equal as sets, row by row
  kExpertWeights,  // paired with the ids of its layer
};

struct Values {
  ValueKind kind = ValueKind::kActivation;
  Shape shape;
  std::vector<double> v;
};

// By the golden's name.
using NamedValues = std::map<std::string, Values>;

Values values_of(const Tensor& x, ValueKind kind);

}  // namespace tapeline
