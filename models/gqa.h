// Grouped-query attention: H query heads share G key heads (arXiv 2305.13245).
//
// Shape suffixes: T tokens, S keys, D model, H heads, G key heads, A head dims.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>

#include "autograd/ops.h"
#include "models/context.h"
#include "models/layers.h"

namespace tapeline {

struct GqaConfig {
  int64_t dim = 0, heads = 0, key_heads = 0, head_dim = 0;
  bool qk_norm = false;  // RMS norm over each head, before rope
  double eps = 1e-6;
};

struct Gqa {
  GqaConfig c;
  int layer = 0;
  Linear q{c.dim, c.heads* c.head_dim};
  Linear k{c.dim, c.key_heads* c.head_dim};
  Linear v{c.dim, c.key_heads* c.head_dim};
  Linear o{c.heads * c.head_dim, c.dim};
  std::optional<RmsNorm> q_norm =
      make_if<RmsNorm>(c.qk_norm, c.head_dim, c.eps);
  std::optional<RmsNorm> k_norm =
      make_if<RmsNorm>(c.qk_norm, c.head_dim, c.eps);
  FIELDS(q, k, v, o, q_norm, k_norm);

  Tensor operator()(const Tensor& x_TD, Context& ctx) const {
    const int64_t t = x_TD.size(0);
    Tensor q_THA = reshape(q(x_TD), {t, c.heads, c.head_dim});
    Tensor k_TGA = reshape(k(x_TD), {t, c.key_heads, c.head_dim});
    const Tensor v_TGA = reshape(v(x_TD), {t, c.key_heads, c.head_dim});
    if (q_norm) q_THA = (*q_norm)(q_THA);
    if (k_norm) k_TGA = (*k_norm)(k_TGA);
    const Tensor k_SGA = ctx.cached(layer, "key", rope(k_TGA, ctx.rope));
    const Tensor v_SGA = ctx.cached(layer, "value", v_TGA);
    const Tensor o_THA =
        attention(rope(q_THA, ctx.rope), k_SGA, v_SGA, ctx.sequence,
                  1 / std::sqrt(static_cast<double>(c.head_dim)));
    return o(reshape(o_THA, {t, c.heads * c.head_dim}));
  }
};

}  // namespace tapeline
