#include <utility>

#include "autograd/ops.h"
#include "autograd/ops/op.h"
#include "autograd/shape_rules.h"
#include "kernels/layer_norm/layer_norm.h"
#include "kernels/rms_norm/rms_norm.h"

namespace tapeline {
namespace {

using internal::as_rows;
using internal::empty_like;
using internal::rows_or_copy;

struct RmsNormNode : Node {
  SavedTensor x_ND, rstd_N;
  ParameterUse w_D;
  Shape shape;

  void backward_inputs(Backward& b) override {
    if (!b.needs(0)) return;
    const Tensor dy_ND = as_rows(b.grad());
    Tensor dx = Tensor::empty(shape, dy_ND.dtype());
    dispatch_float(dy_ND.dtype(), [&]<class T>() {
      rms_norm_backward<T>(launch(), read<T>(dy_ND), read<T>(x_ND.unpack()),
                           read<T>(w_D.value()),
                           read<Accumulator<T>>(rstd_N.unpack()),
                           write<T>(as_rows(dx)));
    });
    b.add(0, std::move(dx));
  }
  bool has_weights() const override { return w_D.trainable(); }
  void backward_weights(Backward& b) override {
    const Tensor dy_ND = as_rows(b.grad());
    dispatch_float(dy_ND.dtype(), [&]<class T>() {
      rms_norm_backward_weight<T>(launch(), read<T>(dy_ND),
                                  read<T>(x_ND.unpack()),
                                  read<Accumulator<T>>(rstd_N.unpack()),
                                  write<Accumulator<T>>(b.accumulator(w_D)));
    });
  }
};

struct LayerNormNode : Node {
  SavedTensor x_ND, mean_N, rstd_N;
  ParameterUse w_D, b_D;
  Shape shape;

  void backward_inputs(Backward& b) override {
    if (!b.needs(0)) return;
    const Tensor dy_ND = as_rows(b.grad());
    Tensor dx = Tensor::empty(shape, dy_ND.dtype());
    dispatch_float(dy_ND.dtype(), [&]<class T>() {
      using A = Accumulator<T>;
      layer_norm_backward<T>(launch(), read<T>(dy_ND), read<T>(x_ND.unpack()),
                             read<T>(w_D.value()), read<A>(mean_N.unpack()),
                             read<A>(rstd_N.unpack()), write<T>(as_rows(dx)));
    });
    b.add(0, std::move(dx));
  }
  bool has_weights() const override { return w_D.trainable(); }
  void backward_weights(Backward& b) override {
    const Tensor dy_ND = as_rows(b.grad());
    dispatch_float(dy_ND.dtype(), [&]<class T>() {
      using A = Accumulator<T>;
      layer_norm_backward_weight<T>(
          launch(), read<T>(dy_ND), read<T>(x_ND.unpack()),
          read<A>(mean_N.unpack()), read<A>(rstd_N.unpack()),
          write<A>(b.accumulator(w_D)), write<A>(b.accumulator(b_D)));
    });
  }
};

}  // namespace

Tensor rms_norm(const Tensor& x_in, const Parameter& w_D, double eps) {
  const Tensor& w = w_D.value();
  internal::checked(shape_rules::norm("rms_norm", x_in.shape(), w.shape()));
  internal::check_dtypes("rms_norm", x_in, w);
  const Tensor x_ND = as_rows(x_in.rank() == 2    ? rows_or_copy(x_in)
                              : x_in.contiguous() ? x_in
                                                  : x_in.clone());
  Tensor y = empty_like(x_in);
  const Tensor rstd_N =
      Tensor::empty({x_ND.size(0)}, accumulator_dtype(x_in.dtype()));
  dispatch_float(x_in.dtype(), [&]<class T>() {
    rms_norm_forward<T>(launch(), read<T>(x_ND), read<T>(w),
                        static_cast<float>(eps), write<T>(as_rows(y)),
                        write<Accumulator<T>>(rstd_N));
  });
  if (auto* n = push<RmsNormNode>("rms_norm", {&x_in}, {&y}, {&w_D})) {
    n->w_D = ParameterUse(w_D);
    n->shape = x_in.shape();
    n->x_ND.save(x_ND);
    n->rstd_N.save(rstd_N);
  }
  return y;
}

Tensor layer_norm(const Tensor& x_in, const Parameter& w_D,
                  const Parameter& b_D, double eps) {
  const Tensor& w = w_D.value();
  internal::checked(shape_rules::norm("layer_norm", x_in.shape(), w.shape()));
  internal::checked(
      shape_rules::same("layer_norm", w.shape(), b_D.value().shape()));
  internal::check_dtypes("layer_norm", x_in, w);
  internal::check_dtypes("layer_norm", x_in, b_D.value());
  CHECK_EQ(w_D.trainable(), b_D.trainable())
      << "[layer_norm] weight and bias are trained together; ";
  const Tensor x_ND = as_rows(x_in.rank() == 2    ? rows_or_copy(x_in)
                              : x_in.contiguous() ? x_in
                                                  : x_in.clone());
  Tensor y = empty_like(x_in);
  const DType acc = accumulator_dtype(x_in.dtype());
  const Tensor mean_N = Tensor::empty({x_ND.size(0)}, acc);
  const Tensor rstd_N = Tensor::empty({x_ND.size(0)}, acc);
  dispatch_float(x_in.dtype(), [&]<class T>() {
    using A = Accumulator<T>;
    layer_norm_forward<T>(launch(), read<T>(x_ND), read<T>(w),
                          read<T>(b_D.value()), static_cast<float>(eps),
                          write<T>(as_rows(y)), write<A>(mean_N),
                          write<A>(rstd_N));
  });
  if (auto* n =
          push<LayerNormNode>("layer_norm", {&x_in}, {&y}, {&w_D, &b_D})) {
    n->w_D = ParameterUse(w_D);
    n->b_D = ParameterUse(b_D);
    n->shape = x_in.shape();
    n->x_ND.save(x_ND);
    n->mean_N.save(mean_N);
    n->rstd_N.save(rstd_N);
  }
  return y;
}

}  // namespace tapeline
