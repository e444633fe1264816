#include "models/glm_moe_dsa.h"

namespace tapeline {

absl::StatusOr<MlaLmConfig> parse_glm_moe_dsa(const Json& json) {
  MlaLmConfig c;
  c.vocabulary = 154880;
  c.dim = 6144;
  c.layers = 78;
  c.dense_hidden = 12288;
  c.expert_hidden = 2048;
  c.heads = 64;
  c.query_rank = 2048;
  c.latent_rank = 512;
  c.nope_dim = 192;
  c.rope_dim = 64;
  c.value_dim = 256;
  c.index_rope.interleaved = true;
  c.index_heads = 32;
  c.index_dim = 128;
  c.index_top_k = 2048;
  c.experts = 256;
  c.experts_per_token = 8;
  return MlaLmConfig::parse_shared(json, c);
}

}  // namespace tapeline
