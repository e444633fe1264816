#include "models/mla_muon.h"

#include <string>
#include <string_view>

namespace tapeline {

std::vector<int64_t> muon_rows(const MlaLmConfig& c,
                               const NamedTensor& tensor) {
  const std::string& name = tensor.name;
  const auto is = [&](std::string_view suffix) {
    return name.ends_with(suffix);
  };
  if (tensor.parameter == nullptr || tensor.shape.rank() != 2 ||
      is("embed_tokens.weight") || is("lm_head.weight") ||
      is("mlp.gate.weight") || is("indexer.weights_proj.weight")) {
    return {};
  }
  if (is("self_attn.q_b_proj.weight")) return {c.nope_dim, c.rope_dim};
  if (is("self_attn.kv_b_proj.weight")) return {c.nope_dim, c.value_dim};
  if (is("self_attn.kv_a_proj_with_mqa.weight")) {
    return {c.latent_rank, c.rope_dim};
  }
  if (is("indexer.wq_b.weight")) return {c.rope_dim, c.index_dim - c.rope_dim};
  return {tensor.shape[0]};
}

}  // namespace tapeline
