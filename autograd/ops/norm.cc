#include <utility>

#include "autograd/ops.h"
#include "autograd/ops/op.h"
#include "autograd/shape_rules.h"
#include "kernels/layer_norm/layer_norm.h"
#include "kernels/rms_norm/rms_norm.h"

namespace tapeline {
namespace {

using internal::empty_like;
using internal::flat_row_count;
using internal::flat_rows;
using internal::flat_rows_or_copy;

struct RmsNormNode : Node {
  SavedTensor x, rstd_N;
  ParameterUse w_D;

  void backward_inputs(Backward& b) override {
    if (!b.needs(0)) return;
    const Tensor& dy = b.grad();
    Tensor dx = empty_like(dy);
    dispatch_float(dy.dtype(), [&]<class T>() {
      rms_norm_backward<T>(launch(), flat_rows(read<T>(dy).view()),
                           flat_rows(read<T>(x.unpack()).view()),
                           read<T>(w_D.value()),
                           read<Accumulator<T>>(rstd_N.unpack()),
                           flat_rows(write<T>(dx).view()));
    });
    b.add(0, std::move(dx));
  }
  bool has_weights() const override { return w_D.trainable; }
  void backward_weights(Backward& b) override {
    const Tensor& dy = b.grad();
    dispatch_float(dy.dtype(), [&]<class T>() {
      rms_norm_backward_weight<T>(launch(), flat_rows(read<T>(dy).view()),
                                  flat_rows(read<T>(x.unpack()).view()),
                                  read<Accumulator<T>>(rstd_N.unpack()),
                                  write<Accumulator<T>>(b.accumulator(w_D)));
    });
  }
};

struct LayerNormNode : Node {
  SavedTensor x, mean_N, rstd_N;
  ParameterUse w_D, b_D;

  void backward_inputs(Backward& b) override {
    if (!b.needs(0)) return;
    const Tensor& dy = b.grad();
    Tensor dx = empty_like(dy);
    dispatch_float(dy.dtype(), [&]<class T>() {
      using A = Accumulator<T>;
      layer_norm_backward<T>(launch(), flat_rows(read<T>(dy).view()),
                             flat_rows(read<T>(x.unpack()).view()),
                             read<T>(w_D.value()), read<A>(mean_N.unpack()),
                             read<A>(rstd_N.unpack()),
                             flat_rows(write<T>(dx).view()));
    });
    b.add(0, std::move(dx));
  }
  bool has_weights() const override { return w_D.trainable; }
  void backward_weights(Backward& b) override {
    const Tensor& dy = b.grad();
    dispatch_float(dy.dtype(), [&]<class T>() {
      using A = Accumulator<T>;
      layer_norm_backward_weight<T>(
          launch(), flat_rows(read<T>(dy).view()),
          flat_rows(read<T>(x.unpack()).view()), read<A>(mean_N.unpack()),
          read<A>(rstd_N.unpack()), write<A>(b.accumulator(w_D)),
          write<A>(b.accumulator(b_D)));
    });
  }
};

}  // namespace

Tensor rms_norm(const Tensor& x_in, const Parameter& w_D, double eps) {
  const Tensor& w = w_D.value();
  internal::checked(shape_rules::norm("rms_norm", x_in.shape(), w.shape()));
  internal::check_dtypes("rms_norm", x_in, w);
  Tensor x = flat_rows_or_copy(x_in);
  Tensor y, rstd_N;
  internal::make_outputs("rms_norm", {&y, &rstd_N}, [&] {
    y = empty_like(x);
    rstd_N = Tensor::empty({flat_row_count(x)}, accumulator_dtype(x.dtype()));
    dispatch_float(x.dtype(), [&]<class T>() {
      rms_norm_forward<T>(launch(), flat_rows(read<T>(x).view()), read<T>(w),
                          static_cast<float>(eps),
                          flat_rows(write<T>(y).view()),
                          write<Accumulator<T>>(rstd_N));
    });
  });
  if (auto* n = push<RmsNormNode>("rms_norm", {&x_in}, {&y}, {&w_D})) {
    n->w_D = ParameterUse(w_D);
    n->x.save(std::move(x));
    n->rstd_N.save(std::move(rstd_N));
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
  Tensor x = flat_rows_or_copy(x_in);
  Tensor y = empty_like(x);
  const DType acc = accumulator_dtype(x.dtype());
  Tensor mean_N = Tensor::empty({flat_row_count(x)}, acc);
  Tensor rstd_N = Tensor::empty({flat_row_count(x)}, acc);
  dispatch_float(x.dtype(), [&]<class T>() {
    using A = Accumulator<T>;
    layer_norm_forward<T>(launch(), flat_rows(read<T>(x).view()), read<T>(w),
                          read<T>(b_D.value()), static_cast<float>(eps),
                          flat_rows(write<T>(y).view()), write<A>(mean_N),
                          write<A>(rstd_N));
  });
  if (auto* n =
          push<LayerNormNode>("layer_norm", {&x_in}, {&y}, {&w_D, &b_D})) {
    n->w_D = ParameterUse(w_D);
    n->b_D = ParameterUse(b_D);
    n->x.save(std::move(x));
    n->mean_N.save(std::move(mean_N));
    n->rstd_N.save(std::move(rstd_N));
  }
  return y;
}

}  // namespace tapeline
