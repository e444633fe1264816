#include "kernels/swiglu/swiglu.h"

#include <utility>

#include "autograd/ops.h"
#include "autograd/ops/op.h"
#include "autograd/shape_rules.h"

namespace tapeline {
namespace {

struct SwigluNode : Node {
  SavedTensor x_T2F;
  Tensor offsets;  // routed rows only

  void backward_inputs(Backward& b) override {
    const Tensor x = x_T2F.unpack();
    const int64_t f = x.size(1) / 2;
    Tensor dx = offsets ? internal::empty_routed(x.shape(), x.dtype())
                        : internal::empty_like(x);
    dispatch_float(x.dtype(), [&]<class T>() {
      const auto in = read<T>(x);
      const auto out = write<T>(dx);
      swiglu_backward<T>(
          launch(), read<T>(b.grad()), in.view().slice(1, 0, f),
          in.view().slice(1, f, 2 * f), out.view().slice(1, 0, f),
          out.view().slice(1, f, 2 * f),
          offsets ? read<int32_t>(offsets).view() : View<const int32_t>());
    });
    b.add(0, std::move(dx));
  }
};

Tensor run(const Tensor& x_in, const Tensor& offsets) {
  const Shape shape = internal::checked(shape_rules::swiglu(x_in.shape()));
  const Tensor x = internal::rows_or_copy(x_in);
  const int64_t f = shape[1];
  const char* op = offsets ? "routed_swiglu" : "swiglu";
  Tensor y;
  internal::make_outputs(op, {&y}, [&] {
    y = offsets ? internal::empty_routed(shape, x.dtype())
                : Tensor::empty(shape, x.dtype());
    dispatch_float(x.dtype(), [&]<class T>() {
      const auto in = read<T>(x);
      swiglu_forward<T>(
          launch(), in.view().slice(1, 0, f), in.view().slice(1, f, 2 * f),
          write<T>(y),
          offsets ? read<int32_t>(offsets).view() : View<const int32_t>());
    });
  });
  if (auto* n = push<SwigluNode>(op, {&x_in}, {&y})) {
    n->x_T2F.save(x);
    n->offsets = offsets;
  }
  return y;
}

}  // namespace

Tensor swiglu(const Tensor& x_T2F) { return run(x_T2F, {}); }

Routed routed_swiglu(const Routed& x_R2F) {
  return {run(x_R2F.data, x_R2F.routing.offsets_E1), x_R2F.routing};
}

}  // namespace tapeline
