// Fingerprints of all parameters or gradients, for equalities that are checked
// from outside: XXH3-128 of the fp32 bytes in the order of canonical names.
#pragma once

#include <string>
#include <vector>

#include "autograd/gradients.h"
#include "autograd/optimizer.h"
#include "models/weights.h"

namespace tapeline {

// Parameters and buffers, in the order given: sort by name before.
std::string parameter_hash(const std::vector<NamedTensor>& sorted);
// Gradient sums of what the optimizer updates, before clipping.
std::string gradient_hash(const Optimizer& optimizer,
                          ParameterGradients& grads);

}  // namespace tapeline
