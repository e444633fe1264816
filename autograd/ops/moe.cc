#include <utility>

#include "autograd/observer.h"
#include "autograd/ops.h"
#include "autograd/ops/op.h"
#include "autograd/shape_rules.h"
#include "kernels/combine/combine.h"
#include "kernels/dispatch/dispatch.h"
#include "kernels/grouped_matmul/grouped_matmul.h"
#include "kernels/route/route.h"
#include "kernels/router/router.h"

namespace tapeline {
namespace {

RouterOptions kernel_options(const RouterRule& rule) {
  RouterOptions options;
  options.score =
      rule.sigmoid ? RouterOptions::kSigmoid : RouterOptions::kSoftmax;
  options.top_k = rule.top_k;
  options.groups = rule.groups;
  options.top_groups = rule.top_groups;
  options.normalize = rule.normalize;
  options.scale = rule.scale;
  return options;
}

// Router arithmetic is done in fp32 (f64 beside f64), never in bf16.
template <class F>
void dispatch_acc(const Tensor& logits, F&& f) {
  CHECK(logits.dtype() != DType::kBf16)
      << "[router] logits are fp32, got " << logits;
  if (logits.dtype() == DType::kF64) {
    f.template operator()<double>();
  } else {
    f.template operator()<float>();
  }
}

struct RouterWeightsNode : Node {
  SavedTensor logits_TE, expert_TK;
  RouterOptions options;

  void backward_inputs(Backward& b) override {
    const Tensor logits = logits_TE.unpack();
    Tensor dlogits = internal::empty_like(logits);
    dispatch_acc(logits, [&]<class A>() {
      router_weights_backward<A>(launch(), read<A>(b.grad()), read<A>(logits),
                                 read<int32_t>(expert_TK.unpack()), options,
                                 write<A>(dlogits));
    });
    b.add(0, std::move(dlogits));
  }
};

struct DispatchNode : Node {
  SavedTensor row_TK;
  Shape x_shape;

  void backward_inputs(Backward& b) override {
    const Tensor& dx_RD = b.grad();
    Tensor dx_TD = Tensor::empty(x_shape, dx_RD.dtype());
    dispatch_float(dx_RD.dtype(), [&]<class T>() {
      dispatch_backward<T>(launch(), read<T>(dx_RD),
                           read<int32_t>(row_TK.unpack()), write<T>(dx_TD));
    });
    b.add(0, std::move(dx_TD));
  }
};

struct GroupedLinearNode : Node {
  SavedTensor x_RD;
  Tensor offsets_E1;
  ParameterUse w_EFD;
  Shape x_shape;

  void backward_inputs(Backward& b) override {
    if (!b.needs(0)) return;
    const Tensor& dy_RF = b.grad();
    Tensor dx_RD = internal::empty_routed(x_shape, dy_RF.dtype());
    dispatch_float(dy_RF.dtype(), [&]<class T>() {
      grouped_matmul_dgrad<T>(launch(), read<T>(dy_RF), read<T>(w_EFD.value()),
                              read<int32_t>(offsets_E1), write<T>(dx_RD));
    });
    b.add(0, std::move(dx_RD));
  }
  bool has_weights() const override { return w_EFD.trainable; }
  void backward_weights(Backward& b) override {
    const Tensor& dy_RF = b.grad();
    dispatch_float(dy_RF.dtype(), [&]<class T>() {
      grouped_matmul_wgrad<T, Accumulator<T>>(
          launch(), read<T>(dy_RF), read<T>(x_RD.unpack()),
          read<int32_t>(offsets_E1),
          write<Accumulator<T>>(b.accumulator(w_EFD)));
    });
  }
};

struct CombineNode : Node {
  SavedTensor x_RD, weight_TK, row_TK;

  void backward_inputs(Backward& b) override {
    const Tensor x = x_RD.unpack(), weight = weight_TK.unpack();
    Tensor dx = internal::empty_routed(x.shape(), x.dtype());
    Tensor dweight = internal::empty_like(weight);
    dispatch_float(x.dtype(), [&]<class T>() {
      using A = Accumulator<T>;
      combine_backward<T>(launch(), read<T>(b.grad()), read<T>(x),
                          read<A>(weight), read<int32_t>(row_TK.unpack()),
                          write<T>(dx), write<A>(dweight));
    });
    b.add(0, std::move(dx));
    b.add(1, std::move(dweight));
  }
};

}  // namespace

Tensor choose_experts(const Tensor& logits_in, const Tensor& bias_E,
                      const RouterRule& rule) {
  const Tensor logits_TE = internal::rows_or_copy(logits_in);
  const Tensor expert_TK = Tensor::empty(
      internal::checked(shape_rules::router(logits_TE.shape(), rule)),
      DType::kI32);
  dispatch_acc(logits_TE, [&]<class A>() {
    // The bias buffer is fp32; beside f64 logits it is widened.
    const Tensor bias = bias_E && bias_E.dtype() != logits_TE.dtype()
                            ? cast(bias_E.detach(), logits_TE.dtype())
                            : bias_E;
    router_choose<A>(launch(), read<A>(logits_TE),
                     bias ? read<A>(bias).view() : View<const A>(),
                     kernel_options(rule), write<int32_t>(expert_TK));
  });
  return observe_choice("router_ids", expert_TK);
}

Tensor router_weights(const Tensor& logits_in, const Tensor& expert_TK,
                      const RouterRule& rule) {
  internal::checked(shape_rules::router(logits_in.shape(), rule));
  const Tensor logits_TE = internal::rows_or_copy(logits_in);
  Tensor weight_TK = Tensor::empty(expert_TK.shape(), logits_TE.dtype());
  dispatch_acc(logits_TE, [&]<class A>() {
    router_weights<A>(launch(), read<A>(logits_TE), read<int32_t>(expert_TK),
                      kernel_options(rule), write<A>(weight_TK));
  });
  if (auto* n = push<RouterWeightsNode>("router_weights", {&logits_in},
                                        {&weight_TK})) {
    n->logits_TE.save(logits_TE);
    n->expert_TK.save(expert_TK);
    n->options = kernel_options(rule);
  }
  observe_with("router_weights", [&] { return weight_TK; });
  return weight_TK;
}

Routed dispatch(const Tensor& x_in, const Tensor& expert_TK, int64_t experts) {
  const Shape shape =
      internal::checked(shape_rules::dispatch(x_in.shape(), expert_TK.shape()));
  const int64_t rows = shape[0];
  Routed out;
  Routing& routing = out.routing;
  internal::make_outputs(
      "dispatch",
      {&out.data, &routing.offsets_E1, &routing.row_TK, &routing.token_R,
       &routing.slot_R},
      [&] {
        out.data = internal::empty_routed(shape, x_in.dtype());
        routing.offsets_E1 = Tensor::empty({experts + 1}, DType::kI32);
        routing.row_TK = Tensor::empty(expert_TK.shape(), DType::kI32);
        routing.token_R = Tensor::empty({rows}, DType::kI32);
        routing.slot_R = Tensor::empty({rows}, DType::kI32);
        const Tensor space = internal::workspace(route_workspace_bytes(
            launch(), expert_TK.size(0), expert_TK.size(1), experts));
        route(launch(), read<int32_t>(expert_TK),
              write<int32_t>(routing.offsets_E1),
              write<int32_t>(routing.row_TK), write<int32_t>(routing.token_R),
              write<int32_t>(routing.slot_R),
              internal::bytes_of(write<uint8_t>(space).view()));
        const Tensor x_TD = internal::rows_or_copy(x_in);
        dispatch_float(x_TD.dtype(), [&]<class T>() {
          dispatch_forward<T>(launch(), read<T>(x_TD),
                              read<int32_t>(routing.row_TK),
                              write<T>(out.data));
        });
      });
  if (auto* n = push<DispatchNode>("dispatch", {&x_in}, {&out.data})) {
    n->row_TK.save(routing.row_TK);
    n->x_shape = x_in.shape();
  }
  return out;
}

Routed grouped_linear(const Routed& x_R, const Parameter& w_EFD) {
  const Tensor& x_RD = x_R.data;
  const Tensor& offsets = x_R.routing.offsets_E1;
  const Tensor& w = w_EFD.value();
  const Shape shape = internal::checked(shape_rules::grouped_linear(
      x_RD.shape(), w.shape(), offsets.size(0) - 1));
  internal::check_dtypes("grouped_linear", x_RD, w);
  Tensor y_RF;
  internal::make_outputs("grouped_linear", {&y_RF}, [&] {
    y_RF = internal::empty_routed(shape, x_RD.dtype());
    dispatch_float(x_RD.dtype(), [&]<class T>() {
      grouped_matmul_forward<T>(launch(), read<T>(x_RD), read<T>(w),
                                read<int32_t>(offsets), write<T>(y_RF));
    });
  });
  if (auto* n = push<GroupedLinearNode>("grouped_linear", {&x_RD}, {&y_RF},
                                        {&w_EFD})) {
    n->w_EFD = ParameterUse(w_EFD);
    n->offsets_E1 = offsets;
    n->x_shape = x_RD.shape();
    if (w_EFD.trainable()) n->x_RD.save(x_RD);
  }
  return {y_RF, x_R.routing};
}

Tensor combine(const Routed& x_R, const Tensor& weight_in) {
  const Tensor weight_TK = internal::rows_or_copy(weight_in);
  const Tensor& x_RD = x_R.data;
  const Tensor& row_TK = x_R.routing.row_TK;
  const Shape shape = internal::checked(
      shape_rules::combine(x_RD.shape(), weight_TK.shape(), row_TK.shape()));
  internal::check_accumulates("combine", x_RD, weight_TK);
  Tensor y_TD;
  internal::make_outputs("combine", {&y_TD}, [&] {
    y_TD = Tensor::empty(shape, x_RD.dtype());
    dispatch_float(x_RD.dtype(), [&]<class T>() {
      combine_forward<T>(launch(), read<T>(x_RD),
                         read<Accumulator<T>>(weight_TK), read<int32_t>(row_TK),
                         write<T>(y_TD));
    });
  });
  if (auto* n = push<CombineNode>("combine", {&x_RD, &weight_in}, {&y_TD})) {
    n->x_RD.save(x_RD);
    n->weight_TK.save(weight_TK);
    n->row_TK.save(row_TK);
  }
  return y_TD;
}

}  // namespace tapeline
