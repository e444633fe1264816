// Multi-head latent attention: queries and keys through low-rank latents, and
// one rotary key shared by all heads (DeepSeek-V2, arXiv 2405.04434).
//
// Two forms with one set of weights. Plain: every head gets its own keys and
// values from kv_b. Absorbed: kv_b is folded into query and output, so all
// heads attend to one key row [latent | rotary key] per token; this is the form
// sparse attention works in and what a decoding cache stores.
// Shape suffixes: T tokens, S keys, D model, H heads, L latent rank, Q query
// rank, N no-position dims, R rotary dims, V value dims per head.
#pragma once

#include <cstdint>
#include <vector>

#include "autograd/ops.h"
#include "models/layers.h"

namespace tapeline {

struct MlaConfig {
  int64_t dim = 0, heads = 0, query_rank = 0, latent_rank = 0;
  int64_t nope_dim = 0, rope_dim = 0, value_dim = 0;
  double latent_eps = 1e-6;
  double softmax_scale = 0;

  int64_t query_dim() const { return nope_dim + rope_dim; }
};

struct MlaStates {
  Tensor query_latent_TQ;  // normed; the indexer's input too
  Tensor query_nope_THN, query_rope_THR;
  Tensor latent_TL, key_rope_TR;
};

struct Mla {
  MlaConfig c;
  Linear q_a{c.dim, c.query_rank};
  RmsNorm q_a_norm{c.query_rank, c.latent_eps};
  Linear q_b{c.query_rank, c.heads* c.query_dim()};
  Linear kv_a{c.dim, c.latent_rank + c.rope_dim};
  RmsNorm kv_a_norm{c.latent_rank, c.latent_eps};
  Linear kv_b{c.latent_rank, c.heads*(c.nope_dim + c.value_dim)};
  Linear o{c.heads * c.value_dim, c.dim};
  FIELDS(q_a, q_a_norm, q_b, kv_a, kv_a_norm, kv_b, o);

  MlaStates project(const Tensor& x_TD, const RopeTable& table) const {
    const int64_t t = x_TD.size(0);
    MlaStates s;
    s.query_latent_TQ = q_a_norm(q_a(x_TD));
    const std::vector<Tensor> q =
        split(reshape(q_b(s.query_latent_TQ), {t, c.heads, c.query_dim()}),
              {c.nope_dim, c.rope_dim});
    s.query_nope_THN = q[0];
    s.query_rope_THR = rope(q[1], table);
    const std::vector<Tensor> kv =
        split(kv_a(x_TD), {c.latent_rank, c.rope_dim});
    s.latent_TL = kv_a_norm(kv[0]);
    s.key_rope_TR = reshape(rope(reshape(kv[1], {t, 1, c.rope_dim}), table),
                            {t, c.rope_dim});
    return s;
  }

  // Absorbed form.
  Tensor absorbed_query_THD(const MlaStates& s) const {
    return concat({head_linear(s.query_nope_THN, kv_b.weight,
                               {c.heads, 0, c.nope_dim,
                                HeadRows::Direction::kTransposed}),
                   s.query_rope_THR});
  }
  Tensor absorbed_key_TD(const MlaStates& s) const {
    return concat({s.latent_TL, s.key_rope_TR});
  }
  Tensor absorbed_output(const Tensor& o_THL) const {
    return merge(head_linear(o_THL, kv_b.weight,
                             {c.heads, c.nope_dim, c.nope_dim + c.value_dim}));
  }

  // Plain form.
  Tensor query_THD(const MlaStates& s) const {
    return concat({s.query_nope_THN, s.query_rope_THR});
  }
  // Keys [T, H, N + R] and values [T, H, V].
  std::pair<Tensor, Tensor> keys_values(const MlaStates& s) const {
    const int64_t t = s.latent_TL.size(0);
    const std::vector<Tensor> kv = split(
        reshape(kv_b(s.latent_TL), {t, c.heads, c.nope_dim + c.value_dim}),
        {c.nope_dim, c.value_dim});
    return {concat({kv[0], expand_heads(s.key_rope_TR, c.heads)}), kv[1]};
  }
  Tensor merge(const Tensor& o_THV) const {
    return o(reshape(o_THV, {o_THV.size(0), c.heads * c.value_dim}));
  }
};

// Plain-form attention over selected keys, head by head: what the absorbed form
// is checked against.
Tensor selected_attention(const Tensor& q_THD, const Tensor& k_SHD,
                          const Tensor& v_SHV, const DsaSelection& selection,
                          double scale);

}  // namespace tapeline
