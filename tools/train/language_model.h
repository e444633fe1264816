// LanguageModel: what training, evaluation and generation need of a model,
// whatever its family.
//
// Families are structs that read like a paper (models/); this is the one place
// that hides which. Made from the keys of a Hugging Face config.json.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "autograd/memory_plan.h"
#include "dist/pipeline/layout.h"
#include "models/batch.h"
#include "models/context.h"
#include "models/latent_attention.h"
#include "models/pipeline_stage.h"
#include "models/stage_state.h"
#include "models/weights.h"
#include "runtime/json.h"

namespace tapeline {

// Choices of a run that config.json does not hold.
struct ModelChoices {
  int mtp_depths = -1;          // -1: as many as there are MTP layers
  bool mtp_after_norm = false;  // hidden state given to depth 1
  IndexerTraining indexer = IndexerTraining::kFrozen;
  // Form of latent attention; not given: absorbed where keys are selected.
  std::optional<bool> absorbed;
  BalanceRule balance;
};

class LanguageModel {
 public:
  virtual ~LanguageModel() = default;

  virtual const Json& config() const = 0;
  virtual int64_t vocabulary() const = 0;
  virtual double initializer_std() const = 0;
  virtual const std::vector<int64_t>& eos_ids() const = 0;
  virtual int mtp_depths() const = 0;
  virtual const RouterRule& router_rule() const = 0;
  // Attention that has a plain and an absorbed form, and over which keys.
  virtual bool latent_attention() const = 0;
  virtual int layers() const = 0;          // prediction layers included
  virtual int decoder_layers() const = 0;  // without them
  virtual int index_top_k() const = 0;     // keys a token attends to, 0: all
  virtual int64_t experts() const = 0;  // of a layer that routes, 0: none does
  // The layer as which prediction depth `depth` reports.
  virtual int mtp_layer(int depth) const = 0;

  // The pointers live as long as this object.
  virtual std::vector<NamedTensor> named_tensors() = 0;
  virtual std::vector<TensorCopy> copies() const = 0;
  // Freezes what this run does not train; call once there are values.
  virtual void apply_training_choices() = 0;
  // OptimizedTensor::muon_rows of a tensor.
  virtual std::vector<int64_t> muon_rows(const NamedTensor&) const = 0;
  // The bias of the router that reports as `layer`; null if it has none.
  virtual Buffer* router_bias(int layer) = 0;

  // What the layers of a pass over `tokens` tokens could offload.
  virtual std::vector<LayerCall> layer_calls(int64_t tokens) const = 0;
  virtual void prepare(Context& ctx) const = 0;
  virtual LanguageModelLoss loss(const Batch& batch, Context& ctx) const = 0;
  virtual Tensor logits(const Tensor& ids_T, Context& ctx) const = 0;

  // --- In parts, for pipelines (models/pipeline_stage.h). Tensors of stages
  // that are not this rank's never get values.
  virtual std::vector<NamedTensor> stage_tensors(const Layout& layout,
                                                 int stage) = 0;
  virtual SharedWeights shared_embedding(const Layout& layout) const = 0;
  virtual const Parameter& embedding() const = 0;
  // `layout` and this object outlive it.
  virtual std::unique_ptr<LanguageModelStage> make_stage(
      const Layout& layout, int stage, DType dtype,
      StageMemory memory) const = 0;
};

// Values of model_type that make_language_model knows.
std::vector<std::string> language_model_families();

absl::StatusOr<std::unique_ptr<LanguageModel>> make_language_model(
    const Json& config, const ModelChoices& choices);

}  // namespace tapeline
