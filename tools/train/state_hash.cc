#include "tools/train/state_hash.h"

#include "runtime/access.h"
#include "runtime/hash.h"

namespace tapeline {
namespace {

// Other dtypes count by the fp32 values they round to.
void add(Hasher& hasher, const Tensor& t) {
  if (t.dtype() == DType::kF32) {
    const auto bytes = read<float>(t);
    hasher.update(bytes.view().data, static_cast<size_t>(t.bytes()));
    return;
  }
  dispatch_float(t.dtype(), [&]<class T>() {
    const auto from = read<T>(t);
    std::vector<float> values(static_cast<size_t>(t.elements()));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>(from.view().data[i]);
    }
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
