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

// For the parts of a parameter's gradient; undefined without parts.
template <class A>
Tensor partial_of(const ParameterUse& use, int64_t parts, Shape each) {
  if (!use.trainable || parts == 0) return {};
  Shape shape{parts};
  for (int i = 0; i < each.rank(); ++i) shape.push_back(each[i]);
  return Tensor::empty(shape, dtype_of<A>(), Tag::kWorkspace);
}

// Where a pass over dy and x can make dx and W's sums, it leaves those in
// partial. It runs in I, or in W where nobody wants dx: the sums are the same,
// whether a stage begins here or what comes before is frozen.
struct RmsNormNode : Node {
  SavedTensor x, rstd_N;
  ParameterUse w_D;
  Tensor partial_PD;

  // dx, which is not written if it is not wanted and has no sums beside it.
  Tensor run(const Tensor& dy, bool wanted) {
    Tensor dx = empty_like(dy);
    dispatch_float(dy.dtype(), [&]<class T>() {
      using A = Accumulator<T>;
      const auto dy_in = read<T>(dy), x_in = read<T>(x.unpack()),
                 w = read<T>(w_D.value());
      const auto dx_out = write<T>(dx);
      const View<const T> dy_ND = flat_rows(dy_in.view()),
                          x_ND = flat_rows(x_in.view());
      const View<T> dx_ND = flat_rows(dx_out.view());
      partial_PD =
          partial_of<A>(w_D, rms_norm_parts<T>(launch(), dy_ND, x_ND, w, dx_ND),
                        {w.view().size(0)});
      const auto rstd = read<A>(rstd_N.unpack());
      const auto backward = [&](const View<A>& partial) {
        rms_norm_backward<T>(launch(), dy_ND, x_ND, w, rstd, dx_ND, partial);
      };
      if (partial_PD) {
        backward(write<A>(partial_PD));
      } else if (wanted) {
        backward({});
      }
    });
    return dx;
  }
  void backward_inputs(Backward& b) override {
    if (b.needs(0)) b.add(0, run(b.grad(), true));
  }
  bool has_weights() const override { return w_D.trainable; }
  void backward_weights(Backward& b) override {
    const Tensor& dy = b.grad();
    if (!b.needs(0)) run(dy, false);
    dispatch_float(dy.dtype(), [&]<class T>() {
      if (const Tensor partial = std::exchange(partial_PD, {})) {
        return rms_norm_add_parts<Accumulator<T>>(
            launch(), read<Accumulator<T>>(partial),
            write<Accumulator<T>>(b.accumulator(w_D)));
      }
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
  Tensor partial_P2D;

  // dx, which is not written if it is not wanted and has no sums beside it.
  Tensor run(const Tensor& dy, bool wanted) {
    Tensor dx = empty_like(dy);
    dispatch_float(dy.dtype(), [&]<class T>() {
      using A = Accumulator<T>;
      const auto dy_in = read<T>(dy), x_in = read<T>(x.unpack()),
                 w = read<T>(w_D.value());
      const auto dx_out = write<T>(dx);
      const View<const T> dy_ND = flat_rows(dy_in.view()),
                          x_ND = flat_rows(x_in.view());
      const View<T> dx_ND = flat_rows(dx_out.view());
      partial_P2D = partial_of<A>(
          w_D, layer_norm_parts<T>(launch(), dy_ND, x_ND, w, dx_ND),
          {2, w.view().size(0)});
      const auto mean = read<A>(mean_N.unpack()),
                 rstd = read<A>(rstd_N.unpack());
      const auto backward = [&](const View<A>& partial) {
        layer_norm_backward<T>(launch(), dy_ND, x_ND, w, mean, rstd, dx_ND,
                               partial);
      };
      if (partial_P2D) {
        backward(write<A>(partial_P2D));
      } else if (wanted) {
        backward({});
      }
    });
    return dx;
  }
  void backward_inputs(Backward& b) override {
    if (b.needs(0)) b.add(0, run(b.grad(), true));
  }
  bool has_weights() const override { return w_D.trainable; }
  void backward_weights(Backward& b) override {
    const Tensor& dy = b.grad();
    if (!b.needs(0)) run(dy, false);
    dispatch_float(dy.dtype(), [&]<class T>() {
      using A = Accumulator<T>;
      if (const Tensor partial = std::exchange(partial_P2D, {})) {
        return layer_norm_add_parts<A>(launch(), read<A>(partial),
                                       write<A>(b.accumulator(w_D)),
                                       write<A>(b.accumulator(b_D)));
      }
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
