#include "models/qwen3_moe.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "models/config_reader.h"
#include "runtime/status.h"

namespace tapeline {

absl::StatusOr<GqaLmConfig> parse_qwen3_moe(const Json& json) {
  ASSIGN_OR_RETURN(GqaLmConfig c, GqaLmConfig::parse_shared(json));
  const ConfigReader r(json);
  c.attention.qk_norm = true;
  MoeConfig& m = c.moe;
  m.dim = c.dim;
  ASSIGN_OR_RETURN(m.experts, r.aliased({"num_experts", "n_routed_experts",
                                         "num_local_experts"},
                                        128, 1, 1024));
  ASSIGN_OR_RETURN(m.hidden, r.integer("moe_intermediate_size", 768, 1));
  ASSIGN_OR_RETURN(const int64_t top_k,
                   r.integer("num_experts_per_tok", 8, 1, 64));
  // transformers' default is false, released models say true.
  ASSIGN_OR_RETURN(const bool normalize, r.boolean("norm_topk_prob", false));
  if (top_k > m.experts) {
    return r.error(absl::StrCat("num_experts_per_tok is ", top_k,
                                ", but num_experts is ", m.experts));
  }
  m.rule = {.sigmoid = false,
            .top_k = static_cast<int>(top_k),
            .normalize = normalize};
  m.balance = {BalanceRule::Kind::kSoftmax};
  ASSIGN_OR_RETURN(const int64_t step, r.integer("decoder_sparse_step", 1, 1));
  ASSIGN_OR_RETURN(const std::vector<int64_t> dense_only,
                   r.integers("mlp_only_layers"));
  for (int64_t i = 0; i < c.layers; ++i) {
    const bool listed =
        std::find(dense_only.begin(), dense_only.end(), i) != dense_only.end();
    c.dense[static_cast<size_t>(i)] = listed || (i + 1) % step != 0;
  }
  return c;
}

}  // namespace tapeline
