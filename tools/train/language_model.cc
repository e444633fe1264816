#include "tools/train/language_model.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "models/glm_moe_dsa.h"
#include "models/glm_muon.h"
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
  if (type->string() == "glm_moe_dsa") return make_glm(config, choices);
  return absl::InvalidArgumentError(
      absl::StrCat("model_type is '", type->string(),
                   "', which this program does not know; it knows "
                   "glm_moe_dsa"));
}

}  // namespace tapeline
