// The presets of configs/: their parameters against formulas of their own, and
// that each can be planned.
#include <cstdint>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "models/weights.h"
#include "runtime/device.h"
#include "tools/config/config.h"
#include "tools/train/plan.h"
#include "tools/train/run_options.h"

namespace tapeline {
namespace {

Config preset(const std::string& name) {
  absl::StatusOr<Config> config =
      load_config("configs/" + name + ".toml", {"device=cpu"});
  CHECK(config.ok()) << config.status().message();
  CHECK(check_settings(*config).ok());
  return *std::move(config);
}

int64_t parameters_of(const Config& config) {
  Device device(1, {}, /*dry=*/true);
  const DeviceScope scope(device);
  const std::unique_ptr<LanguageModel> model =
      make_language_model(model_config(config, "").value(),
                          model_choices(config))
          .value();
  return parameter_count(model->named_tensors());
}

// Latent attention, as the DeepSeek-V2 report draws it: down, norm, up for
// queries and for keys and values.
int64_t latent_attention(int64_t d, int64_t heads, int64_t q_rank,
                         int64_t kv_rank, int64_t nope, int64_t rope,
                         int64_t value) {
  const int64_t queries = d * q_rank + q_rank + q_rank * heads * (nope + rope);
  const int64_t keys_values =
      d * (kv_rank + rope) + kv_rank + kv_rank * heads * (nope + value);
  return queries + keys_values + heads * value * d;
}
// Queries from the query latent, one key with a layer norm, weights of heads.
int64_t indexer(int64_t d, int64_t q_rank, int64_t heads, int64_t dim) {
  return q_rank * heads * dim + d * dim + 2 * dim + d * heads;
}
int64_t swiglu(int64_t d, int64_t hidden) { return 3 * d * hidden; }

TEST(Presets, Qwen330bSlice) {
  const int64_t d = 2048, head = 128;
  const int64_t attention =
      d * 32 * head + 2 * d * 4 * head + 32 * head * d + 2 * head;
  const int64_t layer = attention + 128 * d + 128 * swiglu(d, 768) + 2 * d;
  const int64_t all = 2 * 151936 * d + 8 * layer + d;
  EXPECT_EQ(parameters_of(preset("qwen3_30b_slice")), all);
  // Of the same shape in transformers 5.17.
  EXPECT_EQ(all, 5607297024);
}

TEST(Presets, Glm52Slice) {
  const int64_t d = 6144;
  const int64_t attention = latent_attention(d, 64, 2048, 512, 192, 64, 256);
  const int64_t experts = 32 * d + 33 * swiglu(d, 2048);
  const int64_t all = 2 * 32768 * d + d + 4 * (attention + 2 * d) +
                      3 * indexer(d, 2048, 32, 128) + swiglu(d, 12288) +
                      3 * experts;
  EXPECT_EQ(parameters_of(preset("glm52_slice")), all);
  EXPECT_EQ(all, 5055120128);  // as transformers counts it
}

TEST(Presets, Mini) {
  const int64_t d = 1024;
  const int64_t attention =
      latent_attention(d, 32, 512, 512, 128, 64, 128) + 2 * d;
  const int64_t experts = 64 * d + 65 * swiglu(d, 256);
  // Three layers own an indexer, the prediction layer among them, which also
  // has two norms of its inputs, one of its output and their projection.
  const int64_t all = 2 * 256 * d + d + 9 * attention +
                      3 * indexer(d, 512, 16, 128) + swiglu(d, 4096) +
                      8 * experts + 3 * d + 2 * d * d;
  EXPECT_EQ(parameters_of(preset("mini")), all);
  EXPECT_NEAR(static_cast<double>(all), 0.5e9, 0.05e9);
}

TEST(Presets, CanBePlannedOnAGpuThatIsNotThere) {
  for (const char* name : {"tiny", "mini", "glm52_slice", "qwen3_30b_slice"}) {
    SCOPED_TRACE(name);
    const absl::StatusOr<Config> config =
        load_config("configs/" + std::string(name) + ".toml", {"device=cuda"});
    ASSERT_TRUE(config.ok()) << config.status();
    const absl::StatusOr<RunPlan> plan = plan_run(*config, "");
    ASSERT_TRUE(plan.ok()) << plan.status();
    const int64_t count = parameters_of(*config);
    // A weight's bytes; four of its gradient, none where it is frozen; a
    // prediction layer uses embedding and head a second time, with sums of
    // their own. The pool rounds sizes up.
    const auto key = [&](const char* name) {
      const Json* value = config->model.keys.find(name);
      return value == nullptr ? 0 : value->integer();
    };
    const int64_t again = key("num_nextn_predict_layers") * 2 *
                          key("vocab_size") * key("hidden_size");
    const bool bf16 = config->compute_dtype == "bf16";
    EXPECT_GE(plan->parameters, count * (bf16 ? 2 : 4));
    EXPECT_GT(plan->gradients, count * 4 * 0.98);
    EXPECT_LT(plan->gradients, (count + again) * 4 * 1.01);
    EXPECT_GT(plan->optimizer, plan->gradients);
    EXPECT_LT(plan->step.peak, int64_t{139} << 30) << "more than an H200 has";
    // Each layer is in the plan.
    EXPECT_EQ(static_cast<int64_t>(plan->layers.size()),
              config->model.keys.find("num_hidden_layers")->integer() +
                  (plan->model_type == "glm_moe_dsa"
                       ? config->model.keys.find("num_nextn_predict_layers")
                             ->integer()
                       : 0));
  }
}

}  // namespace
}  // namespace tapeline
