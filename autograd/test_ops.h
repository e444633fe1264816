// Small ops for tests of the tape itself: they need no kernel but elementwise.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "autograd/tape.h"
#include "kernels/elementwise/elementwise.h"
#include "runtime/access.h"
#include "runtime/parameter.h"
#include "runtime/tensor.h"

namespace tapeline::test_ops {

inline Tensor product_of(const Tensor& a, const Tensor& b) {
  const Tensor y = Tensor::empty(a.shape(), a.dtype());
  dispatch_float(a.dtype(), [&]<class T>() {
    mul(launch(), read<T>(a).view(), read<T>(b).view(), write<T>(y).view());
  });
  return y;
}

// y = x; calls `on_backward` when its I part runs.
struct PassNode : Node {
  std::function<void(Backward&)> on_backward;
  void backward_inputs(Backward& b) override {
    if (on_backward) on_backward(b);
    b.add(0, b.grad());
  }
};
inline Tensor pass(const Tensor& x, const char* name = "pass",
                   std::function<void(Backward&)> on_backward = nullptr) {
  Tensor y = x.clone();
  if (auto* n = push<PassNode>(name, {&x}, {&y})) {
    n->on_backward = std::move(on_backward);
  }
  return y;
}

// y = a + b; both inputs get the same gradient tensor.
struct PlusNode : Node {
  void backward_inputs(Backward& b) override {
    b.add(0, b.grad());
    b.add(1, b.grad());
  }
};
inline Tensor plus(const Tensor& a, const Tensor& b) {
  Tensor y = Tensor::empty(a.shape(), a.dtype());
  dispatch_float(a.dtype(), [&]<class T>() {
    add(launch(), read<T>(a).view(), read<T>(b).view(), write<T>(y).view());
  });
  push<PlusNode>("plus", {&a, &b}, {&y});
  return y;
}

// y = a b elementwise; saves both.
struct TimesNode : Node {
  SavedTensor a, b;
  void backward_inputs(Backward& back) override {
    back.add(0, product_of(back.grad(), b.unpack()));
    back.add(1, product_of(back.grad(), a.unpack()));
  }
};
inline Tensor times(const Tensor& a, const Tensor& b) {
  Tensor y = product_of(a, b);
  if (auto* n = push<TimesNode>("times", {&a, &b}, {&y})) {
    n->a.save(a);
    n->b.save(b);
  }
  return y;
}

// y = factor x.
struct FactorNode : Node {
  double factor = 1;
  void backward_inputs(Backward& b) override {
    const Tensor dx = Tensor::empty(b.grad().shape(), b.grad().dtype());
    dispatch_float(dx.dtype(), [&]<class T>() {
      scale(launch(), factor, read<T>(b.grad()).view(), write<T>(dx).view());
    });
    b.add(0, dx);
  }
};
inline Tensor factor(const Tensor& x, double by) {
  Tensor y = Tensor::empty(x.shape(), x.dtype());
  dispatch_float(x.dtype(), [&]<class T>() {
    scale(launch(), by, read<T>(x).view(), write<T>(y).view());
  });
  if (auto* n = push<FactorNode>("factor", {&x}, {&y})) n->factor = by;
  return y;
}

// y = x w elementwise; dw += x dy.
struct WeighNode : Node {
  SavedTensor x;
  ParameterUse w;
  void backward_inputs(Backward& b) override {
    if (b.needs(0)) b.add(0, product_of(b.grad(), w.value()));
  }
  bool has_weights() const override { return w.trainable; }
  void backward_weights(Backward& b) override {
    const Tensor dw = product_of(b.grad(), x.unpack());
    dispatch_float(dw.dtype(), [&]<class T>() {
      axpy(launch(), 1.0, read<T>(dw).view(),
           write<Accumulator<T>>(b.accumulator(w)).view());
    });
  }
};
inline Tensor weigh(const Tensor& x, const Parameter& w) {
  Tensor y = product_of(x, w.value());
  if (auto* n = push<WeighNode>("weigh", {&x}, {&y}, {&w})) {
    n->w = ParameterUse(w);
    if (w.trainable()) n->x.save(x);
  }
  return y;
}

inline Parameter parameter(const std::string& name, const Tensor& value) {
  Parameter p(value.shape());
  p.set_value(name, value);
  return p;
}

template <class T>
Tensor values(const std::vector<T>& v) {
  return Tensor::from(v, {static_cast<int64_t>(v.size())});
}

}  // namespace tapeline::test_ops
