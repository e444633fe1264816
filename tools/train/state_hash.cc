#include "tools/train/state_hash.h"

#include "runtime/hash.h"

namespace tapeline {
namespace {

// Other dtypes count by the fp32 values they round to.
void add(Hasher& hasher, const Tensor& t) {
  dispatch_float(t.dtype(), [&]<class T>() {
    const std::vector<T> from = t.to_vector<T>();
    const std::vector<float> values(from.begin(), from.end());
    hasher.update(values.data(), values.size() * sizeof(float));
  });
}

}  // namespace

std::string parameter_hash(const std::vector<NamedTensor>& sorted) {
  Hasher hasher;
  for (const NamedTensor& t : sorted) add(hasher, t.value());
  return to_hex(hasher.digest());
}

std::string gradient_hash(const Optimizer& optimizer,
                          ParameterGradients& grads) {
  Hasher hasher;
  for (const OptimizedTensor& t : optimizer.tensors()) {
    add(hasher, optimizer.gradient(grads, t));
  }
  return to_hex(hasher.digest());
}

}  // namespace tapeline
