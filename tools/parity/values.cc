#include "tools/parity/values.h"

#include "runtime/access.h"
#include "runtime/check.h"

namespace tapeline {

Values values_of(const Tensor& x, ValueKind kind) {
  Values out{kind, x.shape(), {}};
  dispatch(x.dtype(), [&]<class T>() {
    for (const T& v : x.to_vector<T>()) {
      out.v.push_back(static_cast<double>(v));
    }
  });
  return out;
}

}  // namespace tapeline
