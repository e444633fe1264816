#include "tools/train/language_model.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "models/glm_moe_dsa.h"
#include "models/glm_muon.h"
#include "models/gqa_lm.h"
#include "models/llama.h"
#include "models/qwen3.h"
#include "models/qwen3_moe.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

class GlmLanguageModel : public LanguageModel {
 public:
  explicit GlmLanguageModel(SharedGlmConfig config) : model_{config} {}

  const Json& config() const override { return c().hf; }
  int64_t vocabulary() const override { return c().vocabulary; }
  double initializer_std() const override { return c().initializer_std; }
  const std::vector<int64_t>& eos_ids() const override { return c().eos_ids; }
  int mtp_depths() const override { return c().mtp_depths; }

  std::vector<NamedTensor> named_tensors() override {
    return model_.named_tensors();
  }
  void apply_training_choices() override { model_.apply_training_choices(); }
  std::vector<int64_t> muon_rows(const NamedTensor& tensor) const override {
    return tapeline::muon_rows(c(), tensor);
  }
  Buffer* router_bias(int layer) override {
    const auto layers = static_cast<int>(c().layers);
    std::optional<MoeFeedForward>& moe =
        layer < layers ? model_.layers.items[layer].moe
                       : model_.mtp[layer - layers].block.moe;
    return moe && moe->router.bias ? &*moe->router.bias : nullptr;
  }

  void prepare(Context& ctx) const override { model_.prepare(ctx); }
  LanguageModelLoss loss(const Batch& batch, Context& ctx) const override {
    return model_.loss(batch, ctx);
  }
  Tensor logits(const Tensor& ids_T, Context& ctx) const override {
    return model_.logits(ids_T, ctx);
  }

 private:
  const GlmConfig& c() const { return *model_.c; }
  GlmMoeDsa model_;
};

class GqaLanguageModel : public LanguageModel {
 public:
  explicit GqaLanguageModel(SharedGqaLmConfig config) : model_{config} {}

  const Json& config() const override { return c().hf; }
  int64_t vocabulary() const override { return c().vocabulary; }
  double initializer_std() const override { return c().initializer_std; }
  const std::vector<int64_t>& eos_ids() const override { return c().eos_ids; }
  int mtp_depths() const override { return 0; }

  std::vector<NamedTensor> named_tensors() override {
    return model_.named_tensors();
  }
  void apply_training_choices() override {}
  // Matrices inside layers are whole, but for the router, which gates.
  std::vector<int64_t> muon_rows(const NamedTensor& tensor) const override {
    const bool inside = tensor.name.find(".layers.") != std::string::npos &&
                        !tensor.name.ends_with("mlp.gate.weight");
    if (!inside || tensor.parameter == nullptr || tensor.shape.rank() != 2) {
      return {};
    }
    return {tensor.shape[0]};
  }
  Buffer* router_bias(int) override { return nullptr; }

  void prepare(Context& ctx) const override { model_.prepare(ctx); }
  LanguageModelLoss loss(const Batch& batch, Context& ctx) const override {
    return model_.loss(batch, ctx);
  }
  Tensor logits(const Tensor& ids_T, Context& ctx) const override {
    return model_.logits(ids_T, ctx);
  }

 private:
  const GqaLmConfig& c() const { return *model_.c; }
  GqaLm model_;
};

absl::StatusOr<std::unique_ptr<LanguageModel>> make_gqa(
    absl::StatusOr<GqaLmConfig> config, const ModelChoices& choices) {
  RETURN_IF_ERROR(config.status());
  if (choices.mtp_depths > 0 || choices.train_indexer) {
    return absl::InvalidArgumentError(absl::StrCat(
        "this model family has no ",
        choices.train_indexer ? "indexer; set loss.indexer_coefficient"
                              : "prediction layers; set loss.mtp_depths",
        " to 0"));
  }
  config->moe.balance = choices.balance;
  return std::make_unique<GqaLanguageModel>(
      std::make_shared<const GqaLmConfig>(*std::move(config)));
}

absl::StatusOr<std::unique_ptr<LanguageModel>> make_glm(
    const Json& json, const ModelChoices& choices) {
  ASSIGN_OR_RETURN(GlmConfig config, GlmConfig::parse(json));
  if (choices.mtp_depths >= 0) config.mtp_depths = choices.mtp_depths;
  if (config.mtp_depths > 0 && config.mtp_layers == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_nextn_predict_layers is 0, but ", config.mtp_depths,
                     " prediction depths are to be trained"));
  }
  config.mtp_after_norm = choices.mtp_after_norm;
  config.train_indexer = choices.train_indexer;
  config.balance = choices.balance;
  return std::make_unique<GlmLanguageModel>(
      std::make_shared<const GlmConfig>(std::move(config)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<LanguageModel>> make_language_model(
    const Json& config, const ModelChoices& choices) {
  const Json* type = config.find("model_type");
  if (type == nullptr || !type->is_string()) {
    return absl::InvalidArgumentError(
        "the model config has no model_type; add \"model_type\": "
        "\"glm_moe_dsa\"");
  }
  const std::string& family = type->string();
  if (family == "glm_moe_dsa") return make_glm(config, choices);
  if (family == "qwen3") return make_gqa(parse_qwen3(config), choices);
  if (family == "qwen3_moe") return make_gqa(parse_qwen3_moe(config), choices);
  if (family == "llama") return make_gqa(parse_llama(config), choices);
  return absl::InvalidArgumentError(
      absl::StrCat("model_type is '", family,
                   "', which this program does not know; it knows "
                   "glm_moe_dsa, qwen3, qwen3_moe and llama"));
}

}  // namespace tapeline
