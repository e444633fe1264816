// What config.json keys mean, where implementations have differed.
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "models/deepseek_v3.h"
#include "models/glm_moe_dsa.h"
#include "models/llama.h"
#include "models/qwen3_moe.h"

namespace tapeline {
namespace {

Json json(const std::string& text) {
  absl::StatusOr<Json> parsed = parse_json(text, "test");
  CHECK(parsed.ok()) << parsed.status().message();
  return *std::move(parsed);
}
MlaLmConfig glm(const std::string& text) {
  absl::StatusOr<MlaLmConfig> c = parse_glm_moe_dsa(json(text));
  CHECK(c.ok()) << c.status().message();
  return *std::move(c);
}
MlaLmConfig deepseek(const std::string& text) {
  absl::StatusOr<MlaLmConfig> c = parse_deepseek_v3(json(text));
  CHECK(c.ok()) << c.status().message();
  return *std::move(c);
}
std::string types(const MlaLmConfig& c) {
  std::string s;
  for (const bool full : c.full_index) s += full ? 'F' : 'S';
  return s;
}

// The published GLM-5.2 file: layers 0, 1, 2, 6, 10, ... own an indexer.
TEST(Glm, PublishedConfigHasItsTwentyOneIndexers) {
  const MlaLmConfig c = glm(
      R"({"index_topk_freq": 4, "index_skip_topk_offset": 3,
          "num_nextn_predict_layers": 1})");
  std::string want(79, 'S');
  want[0] = want[1] = 'F';
  for (size_t i = 2; i < 79; i += 4) want[i] = 'F';
  EXPECT_EQ(types(c), want);
  EXPECT_EQ(c.experts, 256);
  EXPECT_EQ(c.vocabulary, 154880);
  EXPECT_DOUBLE_EQ(c.mla().softmax_scale, 0.0625);
}

// transformers' default is 2; others take 0 or 1.
TEST(Glm, AnAbsentOffsetIsTwo) {
  EXPECT_EQ(types(glm(R"({"num_hidden_layers": 10, "index_topk_freq": 4})")),
            "FFSSSFSSSF");
}

TEST(Glm, IndexerTypesOverPatternOverFrequency) {
  const std::string frequency =
      R"({"num_hidden_layers": 4, "index_topk_freq": 2)";
  EXPECT_EQ(types(glm(frequency + "}")), "FFSF");
  const std::string pattern = frequency + R"(, "index_topk_pattern": "FSSF")";
  EXPECT_EQ(types(glm(pattern + "}")), "FSSF");
  EXPECT_EQ(types(glm(pattern + R"(, "indexer_types":
                      ["full", "shared", "shared", "shared"]})")),
            "FSSS");
}

TEST(Glm, HeadDimIsIgnored) {
  const MlaLmConfig c = glm(R"({"head_dim": 192, "qk_rope_head_dim": 64})");
  EXPECT_EQ(c.rope.dim, 64);
  EXPECT_EQ(c.index_rope.dim, 64);
}

TEST(Glm, ADefaultShadowsNoAlias) {
  EXPECT_EQ(glm(R"({"n_routed_experts": 16})").experts, 16);
  EXPECT_EQ(glm(R"({"num_experts": 16})").experts, 16);
  EXPECT_EQ(glm(R"({"num_local_experts": 16})").experts, 16);
}

TEST(Glm, LatentNormsHaveTheirOwnEpsilon) {
  const MlaLmConfig c = glm(R"({"rms_norm_eps": 1e-5})");
  EXPECT_EQ(c.eps, 1e-5);
  EXPECT_EQ(c.mla().latent_eps, 1e-6);
}

TEST(Glm, BothRotationsTakeNeighbours) {
  const MlaLmConfig c = glm("{}");
  EXPECT_TRUE(c.rope.interleaved);
  EXPECT_TRUE(c.index_rope.interleaved);
}

TEST(Glm, MlpTypesOverLeadingDenseLayers) {
  const MlaLmConfig c = glm(
      R"({"num_hidden_layers": 3, "first_k_dense_replace": 1,
          "mlp_layer_types": ["sparse", "dense", "sparse"]})");
  EXPECT_EQ(c.dense, (std::vector<bool>{false, true, false}));
}

TEST(DeepSeek, V3AttendsToEveryKey) {
  const MlaLmConfig c = deepseek("{}");
  EXPECT_FALSE(c.sparse);
  EXPECT_EQ(c.groups, 8);
  EXPECT_EQ(c.top_groups, 4);
  EXPECT_EQ(c.eps, 1e-6);
  EXPECT_TRUE(c.rope.interleaved);
}

TEST(DeepSeek, V32SelectsWithAnIndexerThatRotatesHalves) {
  for (const char* text :
       {R"({"index_topk": 2048})", R"({"model_type": "deepseek_v32"})"}) {
    const MlaLmConfig c = deepseek(text);
    EXPECT_TRUE(c.sparse);
    EXPECT_TRUE(c.rope.interleaved);
    EXPECT_FALSE(c.index_rope.interleaved);
    EXPECT_EQ(types(c), std::string(61, 'F'));
  }
  EXPECT_TRUE(deepseek(R"({"index_topk": 8, "indexer_rope_interleave": true})")
                  .index_rope.interleaved);
}

// 192^-0.5 (0.1 ln 40 + 1)^2, cos and sin unscaled.
TEST(DeepSeek, YarnSharpensTheSoftmax) {
  const MlaLmConfig c = deepseek(
      R"({"rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32,
          "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
          "original_max_position_embeddings": 4096}})");
  EXPECT_NEAR(c.mla().softmax_scale, 0.0721688 * 1.8738, 1e-5);
  EXPECT_EQ(c.rope.attention_factor, 1);
  EXPECT_TRUE(c.rope.truncate);
}

TEST(Yarn, WithoutMscaleScalesTheRotation) {
  const MlaLmConfig c = deepseek(
      R"({"rope_parameters": {"rope_type": "yarn", "factor": 4,
          "original_max_position_embeddings": 64}})");
  EXPECT_NEAR(c.rope.attention_factor, 0.1 * std::log(4.0) + 1, 1e-12);
  EXPECT_EQ(c.rope.softmax_factor, 1);
}

TEST(Qwen3Moe, CombineWeightsAreNotNormalisedByDefault) {
  const auto rule = [](const std::string& text) {
    return parse_qwen3_moe(json(text)).value().moe.rule;
  };
  EXPECT_FALSE(rule("{}").normalize);
  EXPECT_TRUE(rule(R"({"norm_topk_prob": true})").normalize);
  EXPECT_FALSE(rule("{}").sigmoid);
}

TEST(Qwen3Moe, SparseStepAndListedLayersDecide) {
  EXPECT_EQ(
      parse_qwen3_moe(json(R"({"num_hidden_layers": 6, "decoder_sparse_step": 2,
                         "mlp_only_layers": [3]})"))
          .value()
          .dense,
      (std::vector<bool>{true, false, true, true, true, false}));
}

TEST(Llama, HeadDimMayBeAbsent) {
  EXPECT_EQ(
      parse_llama(json(R"({"hidden_size": 96, "num_attention_heads": 4})"))
          .value()
          .attention.head_dim,
      24);
}

TEST(Keys, UnknownOnesAreKept) {
  const Json given = json(R"({"of_tomorrow": [1, {"a": null}]})");
  EXPECT_EQ(parse_glm_moe_dsa(given).value().hf, given);
  EXPECT_EQ(parse_deepseek_v3(given).value().hf, given);
  EXPECT_EQ(parse_llama(given).value().hf, given);
}

}  // namespace
}  // namespace tapeline
