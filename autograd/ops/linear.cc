#include <utility>

#include "autograd/ops.h"
#include "autograd/ops/op.h"
#include "autograd/shape_rules.h"
#include "kernels/matmul/matmul.h"

namespace tapeline {
namespace {

using internal::rows_or_copy;

struct LinearNode : Node {
  SavedTensor x_TD;
  ParameterUse w_ND;
  Shape x_shape;

  void backward_inputs(Backward& b) override {
    if (!b.needs(0)) return;
    const Tensor& dy_TN = b.grad();
    Tensor dx_TD = Tensor::empty(x_shape, dy_TN.dtype());
    dispatch_float(dy_TN.dtype(), [&]<class T>() {
      matmul<T, T>(launch(), read<T>(dy_TN), read<T>(w_ND.value()),
                   write<T>(dx_TD));
    });
    b.add(0, std::move(dx_TD));
  }
  bool has_weights() const override { return w_ND.trainable; }
  void backward_weights(Backward& b) override {
    const Tensor& dy_TN = b.grad();
    dispatch_float(dy_TN.dtype(), [&]<class T>() {
      matmul<T, Accumulator<T>>(launch(), read<T>(dy_TN),
                                read<T>(x_TD.unpack()),
                                write<Accumulator<T>>(b.accumulator(w_ND)),
                                {.transpose_a = true, .accumulate = true});
    });
  }
};

// x in the dtype of the router's logits.
Tensor widened(const Tensor& x) {
  return cast(x.detach(), accumulator_dtype(x.dtype()));
}

// Logits, their gradient and both products are in A; only dx is rounded to T.
struct RouterLogitsNode : Node {
  SavedTensor x_TD;
  ParameterUse w_ED;
  Shape x_shape;
  DType x_dtype = DType::kF32;

  void backward_inputs(Backward& b) override {
    if (!b.needs(0)) return;
    const Tensor& dy_TE = b.grad();
    Tensor dx_TD = Tensor::empty(x_shape, dy_TE.dtype());
    dispatch_float(dy_TE.dtype(), [&]<class A>() {
      matmul<A, A>(launch(), read<A>(dy_TE), read<A>(widened(w_ED.value())),
                   write<A>(dx_TD));
    });
    b.add(0, cast(dx_TD, x_dtype));
  }
  bool has_weights() const override { return w_ED.trainable; }
  void backward_weights(Backward& b) override {
    const Tensor& dy_TE = b.grad();
    dispatch_float(dy_TE.dtype(), [&]<class A>() {
      matmul<A, A>(launch(), read<A>(dy_TE), read<A>(widened(x_TD.unpack())),
                   write<A>(b.accumulator(w_ED)),
                   {.transpose_a = true, .accumulate = true});
    });
  }
};

// [heads * R, L] as its rows [begin, end) per head: [heads, end - begin, L].
Tensor head_blocks(const Tensor& w, const HeadRows& rows) {
  return w.view_as({rows.heads, w.size(0) / rows.heads, w.size(1)})
      .slice(1, rows.begin, rows.end);
}

template <class T, class C>
void matmul_heads(const Tensor& a_HMK, const Tensor& b_HKN, const Tensor& c_HMN,
                  const MatmulOptions& options = {}) {
  matmul<T, C>(launch(), read<T>(a_HMK), read<T>(b_HKN), write<C>(c_HMN),
               options);
}

struct HeadLinearNode : Node {
  SavedTensor x_THA;
  ParameterUse w;
  HeadRows rows;
  Shape x_shape;

  bool forward() const {
    return rows.direction == HeadRows::Direction::kForward;
  }
  void backward_inputs(Backward& b) override {
    if (!b.needs(0)) return;
    const Tensor& dy = b.grad();
    Tensor dx = Tensor::empty(x_shape, dy.dtype());
    dispatch_float(dy.dtype(), [&]<class T>() {
      matmul_heads<T, T>(dy.transpose(0, 1), head_blocks(w.value(), rows),
                         dx.transpose(0, 1), {.transpose_b = !forward()});
    });
    b.add(0, std::move(dx));
  }
  bool has_weights() const override { return w.trainable; }
  void backward_weights(Backward& b) override {
    const Tensor dy_H = b.grad().transpose(0, 1);
    const Tensor x_H = x_THA.unpack().transpose(0, 1);
    const Tensor dw = head_blocks(b.accumulator(w), rows);
    dispatch_float(b.grad().dtype(), [&]<class T>() {
      matmul_heads<T, Accumulator<T>>(
          forward() ? dy_H : x_H, forward() ? x_H : dy_H, dw,
          {.transpose_a = true, .accumulate = true});
    });
  }
};

}  // namespace

Tensor linear(const Tensor& x_in, const Parameter& w_ND) {
  const Tensor& w = w_ND.value();
  const Shape shape =
      internal::checked(shape_rules::linear(x_in.shape(), w.shape()));
  internal::check_dtypes("linear", x_in, w);
  const Tensor x_TD = rows_or_copy(x_in);
  Tensor y_TN;
  internal::make_outputs("linear", {&y_TN}, [&] {
    y_TN = Tensor::empty(shape, x_in.dtype());
    dispatch_float(x_TD.dtype(), [&]<class T>() {
      matmul<T, T>(launch(), read<T>(x_TD), read<T>(w), write<T>(y_TN),
                   {.transpose_b = true});
    });
  });
  if (auto* n = push<LinearNode>("linear", {&x_in}, {&y_TN}, {&w_ND})) {
    n->w_ND = ParameterUse(w_ND);
    n->x_shape = x_in.shape();
    if (w_ND.trainable()) n->x_TD.save(x_TD);
  }
  return y_TN;
}

Tensor router_logits(const Tensor& x_in, const Parameter& w_ED) {
  const Tensor& w = w_ED.value();
  Tensor y_TE = Tensor::empty(
      internal::checked(shape_rules::linear(x_in.shape(), w.shape())),
      accumulator_dtype(x_in.dtype()));
  internal::check_dtypes("router_logits", x_in, w);
  const Tensor x_TD = rows_or_copy(x_in);
  dispatch_float(x_TD.dtype(), [&]<class T>() {
    matmul<T, Accumulator<T>>(launch(), read<T>(x_TD), read<T>(w),
                              write<Accumulator<T>>(y_TE),
                              {.transpose_b = true});
  });
  if (auto* n =
          push<RouterLogitsNode>("router_logits", {&x_in}, {&y_TE}, {&w_ED})) {
    n->w_ED = ParameterUse(w_ED);
    n->x_shape = x_in.shape();
    n->x_dtype = x_in.dtype();
    if (w_ED.trainable()) n->x_TD.save(x_TD);
  }
  return y_TE;
}

Tensor head_linear(const Tensor& x_in, const Parameter& w, HeadRows rows) {
  const Shape shape = internal::checked(
      shape_rules::head_linear(x_in.shape(), w.value().shape(), rows));
  internal::check_dtypes("head_linear", x_in, w.value());
  const Tensor x = rows_or_copy(x_in);
  const bool forward = rows.direction == HeadRows::Direction::kForward;
  Tensor y;
  internal::make_outputs("head_linear", {&y}, [&] {
    y = Tensor::empty(shape, x_in.dtype());
    dispatch_float(x.dtype(), [&]<class T>() {
      matmul_heads<T, T>(x.transpose(0, 1), head_blocks(w.value(), rows),
                         y.transpose(0, 1), {.transpose_b = forward});
    });
  });
  if (auto* n = push<HeadLinearNode>("head_linear", {&x_in}, {&y}, {&w})) {
    n->w = ParameterUse(w);
    n->rows = rows;
    n->x_shape = x_in.shape();
    if (w.trainable()) n->x_THA.save(x);
  }
  return y;
}

}  // namespace tapeline
