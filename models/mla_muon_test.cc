#include "models/mla_muon.h"

#include <map>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "models/glm_moe_dsa.h"
#include "models/mla_lm.h"
#include "runtime/json.h"

namespace tapeline {
namespace {

using Rows = std::vector<int64_t>;

TEST(GlmMuon, SplitsHeadsAndLeavesGatesAndVectorsToAdamW) {
  const Json json =
      parse_json(
          R"({"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2,
              "intermediate_size": 24, "moe_intermediate_size": 8,
              "num_attention_heads": 3, "num_key_value_heads": 3,
              "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
              "qk_rope_head_dim": 4, "v_head_dim": 5, "index_n_heads": 2,
              "index_head_dim": 7, "index_topk": 4, "n_routed_experts": 4,
              "num_experts_per_tok": 2, "first_k_dense_replace": 1,
              "num_nextn_predict_layers": 1})",
          "test")
          .value();
  const auto config =
      std::make_shared<const MlaLmConfig>(parse_glm_moe_dsa(json).value());
  MlaLm model{config};
  std::map<std::string, Rows> rows;
  for (const NamedTensor& t : model.named_tensors()) {
    rows[t.name] = muon_rows(*config, t);
  }
  const std::string layer = "model.layers.1.";
  EXPECT_EQ(rows.at(layer + "self_attn.q_a_proj.weight"), Rows{12});
  EXPECT_EQ(rows.at(layer + "self_attn.q_b_proj.weight"), (Rows{6, 4}));
  EXPECT_EQ(rows.at(layer + "self_attn.kv_a_proj_with_mqa.weight"),
            (Rows{10, 4}));
  EXPECT_EQ(rows.at(layer + "self_attn.kv_b_proj.weight"), (Rows{6, 5}));
  EXPECT_EQ(rows.at(layer + "self_attn.o_proj.weight"), Rows{16});
  EXPECT_EQ(rows.at(layer + "self_attn.indexer.wq_b.weight"), (Rows{4, 3}));
  EXPECT_EQ(rows.at(layer + "self_attn.indexer.wk.weight"), Rows{7});
  EXPECT_EQ(rows.at(layer + "mlp.experts.3.gate_proj.weight"), Rows{8});
  EXPECT_EQ(rows.at(layer + "mlp.experts.3.down_proj.weight"), Rows{16});
  EXPECT_EQ(rows.at("model.layers.0.mlp.up_proj.weight"), Rows{24});
  EXPECT_EQ(rows.at("model.layers.2.eh_proj.weight"), Rows{16});
  for (const char* name :
       {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.self_attn.indexer.weights_proj.weight",
        "model.layers.1.self_attn.indexer.k_norm.bias"}) {
    EXPECT_EQ(rows.at(name), Rows{}) << name;
  }
}

}  // namespace
}  // namespace tapeline
