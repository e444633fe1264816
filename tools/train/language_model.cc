#include "tools/train/language_model.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "models/deepseek_v3.h"
#include "models/glm_moe_dsa.h"
#include "models/gqa_lm.h"
#include "models/llama.h"
#include "models/mla_lm.h"
#include "models/mla_muon.h"
#include "models/qwen3.h"
#include "models/qwen3_moe.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

template <class Lm>
class InParts : public LanguageModel {
 public:
  std::vector<NamedTensor> stage_tensors(const Layout& layout,
                                         int stage) override {
    return model_.named_tensors(layout, stage);
  }
  SharedWeights shared_embedding(const Layout& layout) const override {
    return model_.shared_embedding(layout);
  }
  const Parameter& embedding() const override { return model_.embed.weight; }
  std::unique_ptr<LanguageModelStage> make_stage(
      const Layout& layout, int stage, DType dtype,
      StageMemory memory) const override {
    return std::make_unique<ModelStage<Lm>>(model_, layout, stage, dtype,
                                            std::move(memory));
  }

 protected:
  template <class Config>
  explicit InParts(Config config) : model_{std::move(config)} {}
  Lm model_;
};

class MlaLanguageModel : public InParts<MlaLm> {
 public:
  explicit MlaLanguageModel(SharedMlaLmConfig config) : InParts(config) {}

  const Json& config() const override { return c().hf; }
  int64_t vocabulary() const override { return c().vocabulary; }
  double initializer_std() const override { return c().initializer_std; }
  const std::vector<int64_t>& eos_ids() const override { return c().eos_ids; }
  int mtp_depths() const override { return c().mtp_depths; }
  const RouterRule& router_rule() const override { return rule_; }
  bool latent_attention() const override { return true; }
  int layers() const override { return c().total_layers(); }
  int decoder_layers() const override { return static_cast<int>(c().layers); }
  int index_top_k() const override { return c().sparse ? c().index_top_k : 0; }
  int64_t experts() const override { return c().experts; }
  int mtp_layer(int depth) const override {
    return static_cast<int>(c().layers) +
           std::clamp(depth, 0, std::max(0, c().mtp_layers - 1));
  }

  std::vector<NamedTensor> named_tensors() override {
    return model_.named_tensors();
  }
  std::vector<TensorCopy> copies() const override { return model_.copies(); }
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

  std::vector<LayerCall> layer_calls(int64_t tokens) const override {
    return model_.layer_calls(tokens);
  }
  void prepare(Context& ctx) const override { model_.prepare(ctx); }
  LanguageModelLoss loss(const Batch& batch, Context& ctx) const override {
    return model_.loss(batch, ctx);
  }
  Tensor logits(const Tensor& ids_T, Context& ctx) const override {
    return model_.logits(ids_T, ctx);
  }

 private:
  const MlaLmConfig& c() const { return *model_.c; }
  RouterRule rule_ = c().moe().rule;
};

class GqaLanguageModel : public InParts<GqaLm> {
 public:
  explicit GqaLanguageModel(SharedGqaLmConfig config) : InParts(config) {}

  const Json& config() const override { return c().hf; }
  int64_t vocabulary() const override { return c().vocabulary; }
  double initializer_std() const override { return c().initializer_std; }
  const std::vector<int64_t>& eos_ids() const override { return c().eos_ids; }
  int mtp_depths() const override { return 0; }
  const RouterRule& router_rule() const override { return c().moe.rule; }
  bool latent_attention() const override { return false; }
  int layers() const override { return static_cast<int>(c().layers); }
  int decoder_layers() const override { return layers(); }
  int index_top_k() const override { return 0; }
  int64_t experts() const override { return c().moe.experts; }
  int mtp_layer(int) const override { return static_cast<int>(c().layers); }

  std::vector<NamedTensor> named_tensors() override {
    return model_.named_tensors();
  }
  std::vector<TensorCopy> copies() const override { return model_.copies(); }
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

  std::vector<LayerCall> layer_calls(int64_t tokens) const override {
    return model_.layer_calls(tokens);
  }
  void prepare(Context& ctx) const override { model_.prepare(ctx); }
  LanguageModelLoss loss(const Batch& batch, Context& ctx) const override {
    return model_.loss(batch, ctx);
  }
  Tensor logits(const Tensor& ids_T, Context& ctx) const override {
    return model_.logits(ids_T, ctx);
  }

 private:
  const GqaLmConfig& c() const { return *model_.c; }
};

using Made = absl::StatusOr<std::unique_ptr<LanguageModel>>;

template <auto parse>
Made make_gqa(const Json& json, const ModelChoices& choices) {
  ASSIGN_OR_RETURN(GqaLmConfig config, parse(json));
  const bool indexer = choices.indexer != IndexerTraining::kFrozen;
  if (choices.mtp_depths > 0 || indexer) {
    return absl::InvalidArgumentError(
        absl::StrCat("this model family has no ",
                     indexer ? "indexer; set loss.indexer_coefficient"
                             : "prediction layers; set loss.mtp_depths",
                     " to 0"));
  }
  config.moe.balance = choices.balance;
  return std::make_unique<GqaLanguageModel>(
      std::make_shared<const GqaLmConfig>(std::move(config)));
}

template <auto parse>
Made make_mla(const Json& json, const ModelChoices& choices) {
  ASSIGN_OR_RETURN(MlaLmConfig config, parse(json));
  if (choices.mtp_depths >= 0) config.mtp_depths = choices.mtp_depths;
  if (config.mtp_depths > 0 && config.mtp_layers == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_nextn_predict_layers is 0, but ", config.mtp_depths,
                     " prediction depths are to be trained"));
  }
  // One layer may serve any number of depths; several serve one each.
  if (config.mtp_layers > 1 && config.mtp_depths > config.mtp_layers) {
    return absl::InvalidArgumentError(absl::StrCat(
        "num_nextn_predict_layers is ", config.mtp_layers, ", but ",
        config.mtp_depths, " prediction depths are to be trained"));
  }
  if (choices.indexer != IndexerTraining::kFrozen && !config.sparse) {
    return absl::InvalidArgumentError(
        "this model has no indexer; set loss.indexer_coefficient to 0");
  }
  config.mtp_after_norm = choices.mtp_after_norm;
  config.indexer_training = choices.indexer;
  config.absorbed = choices.absorbed.value_or(config.absorbed);
  config.balance = choices.balance;
  return std::make_unique<MlaLanguageModel>(
      std::make_shared<const MlaLmConfig>(std::move(config)));
}

// A family is a row here and a function that reads its config.json.
struct Family {
  const char* model_type;
  Made (*make)(const Json&, const ModelChoices&);
};
constexpr Family kFamilies[] = {
    {"deepseek_v3", make_mla<parse_deepseek_v3>},
    {"deepseek_v32", make_mla<parse_deepseek_v3>},
    {"glm_moe_dsa", make_mla<parse_glm_moe_dsa>},
    {"llama", make_gqa<parse_llama>},
    {"qwen3", make_gqa<parse_qwen3>},
    {"qwen3_moe", make_gqa<parse_qwen3_moe>},
};

}  // namespace

std::vector<std::string> language_model_families() {
  std::vector<std::string> names;
  for (const Family& family : kFamilies) names.push_back(family.model_type);
  return names;
}

absl::StatusOr<std::unique_ptr<LanguageModel>> make_language_model(
    const Json& config, const ModelChoices& choices) {
  const std::string known = absl::StrJoin(language_model_families(), ", ");
  const Json* type = config.find("model_type");
  if (type == nullptr || !type->is_string()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the model config has no model_type; give one of ", known));
  }
  for (const Family& family : kFamilies) {
    if (type->string() == family.model_type) {
      return family.make(config, choices);
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("model_type is '", type->string(),
                   "', which this program does not know; it knows ", known));
}

}  // namespace tapeline
