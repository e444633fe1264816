#include "models/deepseek_v3.h"

#include "models/config_reader.h"

namespace tapeline {

absl::StatusOr<MlaLmConfig> parse_deepseek_v3(const Json& json) {
  const Json* rank = json.find("q_lora_rank");
  if (rank != nullptr && rank->is_null()) {
    return ConfigReader(json).error(
        "q_lora_rank is null; queries without a latent (DeepSeek-V2-Lite) do "
        "not exist here");
  }
  MlaLmConfig c;
  c.vocabulary = 129280;
  c.dim = 7168;
  c.layers = 61;
  c.dense_hidden = 18432;
  c.expert_hidden = 2048;
  c.heads = 128;
  c.query_rank = 1536;
  c.latent_rank = 512;
  c.nope_dim = 128;
  c.rope_dim = 64;
  c.value_dim = 128;
  c.eps = 1e-6;
  const Json* selected = json.find("index_topk");
  const Json* type = json.find("model_type");
  c.sparse = (selected != nullptr && !selected->is_null()) ||
             (type != nullptr && *type == Json("deepseek_v32"));
  c.index_rope.interleaved = false;
  c.index_heads = 64;
  c.index_dim = 128;
  c.index_top_k = 2048;
  c.index_offset = 0;
  c.experts = 256;
  c.experts_per_token = 8;
  c.groups = 8;
  c.top_groups = 4;
  return MlaLmConfig::parse_shared(json, c);
}

}  // namespace tapeline
