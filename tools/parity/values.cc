#include "tools/parity/values.h"

#include "runtime/access.h"
#include "runtime/check.h"

namespace tapeline {
namespace {

template <class T>
std::vector<double> widened(const Tensor& x) {
  const std::vector<T> values = x.to_vector<T>();
  return {values.begin(), values.end()};
}

}  // namespace

Values values_of(const Tensor& x, ValueKind kind) {
  Values out{kind, x.shape(), {}};
  switch (x.dtype()) {
    case DType::kI32:
      out.v = widened<int32_t>(x);
      return out;
    case DType::kI64:
      out.v = widened<int64_t>(x);
      return out;
    case DType::kU8:
      out.v = widened<uint8_t>(x);
      return out;
    case DType::kF64:
      out.v = widened<double>(x);
      return out;
    case DType::kF32:
      out.v = widened<float>(x);
      return out;
    case DType::kBf16: {
      for (const bf16 b : x.to_vector<bf16>()) {
        out.v.push_back(static_cast<double>(static_cast<float>(b)));
      }
      return out;
    }
  }
  CHECK(false) << "no values of " << x;
  return out;
}

}  // namespace tapeline
