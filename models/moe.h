// Mixture of experts: router, experts, and the feed-forward layer they make.
//
// Shape suffixes: T tokens, D model, E experts, K experts per token, R routed
// rows, F expert hidden.
#pragma once

#include <cstdint>
#include <optional>

#include "autograd/checkpoint.h"
#include "autograd/observer.h"
#include "autograd/ops.h"
#include "models/context.h"
#include "models/layers.h"

namespace tapeline {

struct MoeConfig {
  int64_t dim = 0, experts = 0, hidden = 0;
  int64_t shared_hidden = 0;  // 0: no shared expert
  RouterRule rule;
  bool has_bias = false;  // e_score_correction_bias, for the choice alone
  BalanceRule balance;
};

struct RouterOutput {
  Tensor logits_TE, weight_TK, expert_TK;
  Tensor bias_E;  // as the choice used it; undefined without one
};

struct Router {
  MoeConfig c;
  Parameter weight{{c.experts, c.dim}};
  std::optional<Buffer> bias = make_if<Buffer>(c.has_bias, Shape{c.experts});
  FIELDS(weight, bias);

  RouterOutput operator()(const Tensor& x_TD) const {
    const Tensor logits_TE =
        observe("router_logits", router_logits(x_TD, weight));
    // A replay routes as the first run did, whatever has become of the bias.
    const Tensor bias_E =
        bias ? stash([&] { return bias->value(); }) : Tensor();
    const Tensor expert_TK = stash(
        [&] { return choose_experts(logits_TE.detach(), bias_E, c.rule); });
    return {logits_TE, router_weights(logits_TE, expert_TK, c.rule), expert_TK,
            bias_E};
  }
};

struct Experts {
  MoeConfig c;
  Parameter gate_up{{c.experts, 2 * c.hidden, c.dim}};  // gate rows first
  Parameter down{{c.experts, c.dim, c.hidden}};
  FIELDS(gate_up, down);

  Routed operator()(const Routed& x_R) const {
    return grouped_linear(routed_swiglu(grouped_linear(x_R, gate_up)), down);
  }
};

struct MoeFeedForward {
  MoeConfig c;
  int layer = 0;
  Router router{c};
  Experts experts{c};
  std::optional<SwigluFeedForward> shared =
      make_if<SwigluFeedForward>(c.shared_hidden > 0, c.dim, c.shared_hidden);
  FIELDS(router, experts, shared);

  Tensor operator()(const Tensor& x_TD, Context& ctx) const {
    const RouterOutput r = router(x_TD);
    const Routed x_R = dispatch(x_TD, r.expert_TK, c.experts);
    Tensor y_TD = combine(experts(x_R), r.weight_TK);
    if (shared) y_TD = y_TD + (*shared)(x_TD);
    return ctx.attach_router(y_TD, layer, r.logits_TE, r.bias_E, r.expert_TK,
                             c.balance);
  }
};

}  // namespace tapeline
