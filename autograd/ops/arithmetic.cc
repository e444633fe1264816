#include <utility>

#include "autograd/ops.h"
#include "autograd/ops/op.h"
#include "autograd/shape_rules.h"
#include "kernels/elementwise/elementwise.h"

namespace tapeline {
namespace {

using internal::broadcast;
using internal::empty_like;

struct AddNode : Node {
  void backward_inputs(Backward& b) override {
    b.add(0, b.grad());
    b.add(1, b.grad());
  }
};

Tensor multiply(const Tensor& a, const Tensor& b) {
  Tensor y = empty_like(a);
  dispatch_float(a.dtype(), [&]<class T>() {
    mul(launch(), read<T>(a).view(), read<T>(b).view(), write<T>(y).view());
  });
  return y;
}

struct MulNode : Node {
  SavedTensor a, b;
  void backward_inputs(Backward& back) override {
    if (back.needs(0)) back.add(0, multiply(back.grad(), b.unpack()));
    if (back.needs(1)) back.add(1, multiply(back.grad(), a.unpack()));
  }
};

Tensor scaled(const Tensor& x, double factor) {
  Tensor y = empty_like(x);
  dispatch_float(x.dtype(), [&]<class T>() {
    scale(launch(), factor, read<T>(x).view(), write<T>(y).view());
  });
  return y;
}

struct ScaleNode : Node {
  double factor = 1;
  void backward_inputs(Backward& b) override {
    b.add(0, scaled(b.grad(), factor));
  }
};

struct SumNode : Node {
  Shape shape;
  DType dtype = DType::kF32;
  void backward_inputs(Backward& b) override {
    Tensor dx = Tensor::empty(shape, dtype);
    dispatch_float(dtype, [&]<class T>() {
      using A = Accumulator<T>;
      const auto dy = read<A>(b.grad());
      cast(launch(), broadcast(dy.view(), shape), write<T>(dx).view());
    });
    b.add(0, std::move(dx));
  }
};

Tensor converted(const Tensor& x, DType dtype) {
  Tensor y = Tensor::empty(x.shape(), dtype);
  dispatch_float(x.dtype(), [&]<class A>() {
    dispatch_float(dtype, [&]<class B>() {
      cast(launch(), read<A>(x).view(), write<B>(y).view());
    });
  });
  return y;
}

struct CastNode : Node {
  DType from = DType::kF32;
  void backward_inputs(Backward& b) override {
    b.add(0, converted(b.grad(), from));
  }
};

struct AttachNode : Node {
  double factor = 1;
  Shape loss_shape;
  DType loss_dtype = DType::kF32;
  void backward_inputs(Backward& b) override {
    b.add(0, b.grad());
    if (b.needs(1)) b.add(1, Tensor::full(loss_shape, loss_dtype, factor));
  }
};

}  // namespace

const std::vector<std::string>& keepable_ops() {
  static const std::vector<std::string>& ops = *new std::vector<std::string>{
      "attention",        "combine", "dispatch", "grouped_linear",
      "head_linear",      "linear",  "rms_norm", "routed_swiglu",
      "sparse_attention", "swiglu"};
  return ops;
}

Tensor add(const Tensor& a, const Tensor& b) {
  internal::checked(shape_rules::same("add", a.shape(), b.shape()));
  internal::check_dtypes("add", a, b);
  Tensor y = empty_like(a);
  dispatch_float(a.dtype(), [&]<class T>() {
    add(launch(), read<T>(a).view(), read<T>(b).view(), write<T>(y).view());
  });
  push<AddNode>("add", {&a, &b}, {&y});
  return y;
}

Tensor mul(const Tensor& a, const Tensor& b) {
  internal::checked(shape_rules::same("mul", a.shape(), b.shape()));
  internal::check_dtypes("mul", a, b);
  Tensor y = multiply(a, b);
  if (auto* n = push<MulNode>("mul", {&a, &b}, {&y})) {
    if (b.requires_grad) n->a.save(a);
    if (a.requires_grad) n->b.save(b);
  }
  return y;
}

Tensor scale(const Tensor& x, double factor) {
  Tensor y = scaled(x, factor);
  if (auto* n = push<ScaleNode>("scale", {&x}, {&y})) n->factor = factor;
  return y;
}

Tensor sum(const Tensor& x) {
  Tensor y = Tensor::empty({1}, accumulator_dtype(x.dtype()));
  dispatch_float(x.dtype(), [&]<class T>() {
    sum(launch(), read<T>(x).view(), write<Accumulator<T>>(y).view());
  });
  if (auto* n = push<SumNode>("sum", {&x}, {&y})) {
    n->shape = x.shape();
    n->dtype = x.dtype();
  }
  return y;
}

Tensor cast(const Tensor& x, DType dtype) {
  CHECK(is_float(x.dtype()) && is_float(dtype))
      << "[cast] " << x << " to " << dtype;
  Tensor y = converted(x, dtype);
  if (auto* n = push<CastNode>("cast", {&x}, {&y})) n->from = x.dtype();
  return y;
}

Tensor attach(const Tensor& x, const Tensor& loss, double factor) {
  CHECK_EQ(loss.elements(), 1) << "[attach] a loss is one number, got " << loss;
  Tensor y = x.detach();
  if (auto* n = push<AttachNode>("attach", {&x, &loss}, {&y})) {
    n->factor = factor;
    n->loss_shape = loss.shape();
    n->loss_dtype = loss.dtype();
  }
  return y;
}

}  // namespace tapeline
