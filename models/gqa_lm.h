// A decoder-only language model of grouped-query attention and feed-forward
// layers that are dense or mixtures of experts: what Qwen3, Qwen3-MoE and Llama
// have in common. A family is a configuration and a table of names.
//
// Shape suffixes: T tokens, D model, V vocabulary.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "autograd/memory_plan.h"
#include "dist/pipeline/layout.h"
#include "models/batch.h"
#include "models/context.h"
#include "models/gqa.h"
#include "models/layers.h"
#include "models/moe.h"
#include "models/stage_state.h"
#include "models/weights.h"
#include "runtime/json.h"

namespace tapeline {

struct GqaLmConfig {
  int64_t vocabulary = 0, dim = 0, layers = 0, dense_hidden = 0;
  GqaConfig attention;
  MoeConfig moe;            // experts 0: no layer has experts
  std::vector<bool> dense;  // per layer
  double eps = 1e-6;
  RopeConfig rope;
  bool tied_head = false;
  double initializer_std = 0.02;
  int64_t padding_id = -1;
  std::vector<int64_t> eos_ids;
  Json hf;  // every key as read

  // Keys that Qwen3, Qwen3-MoE and Llama share; `head_dim` may be absent.
  static absl::StatusOr<GqaLmConfig> parse_shared(const Json& json);
};
using SharedGqaLmConfig = std::shared_ptr<const GqaLmConfig>;

struct GqaDecoderLayer {
  SharedGqaLmConfig c;
  int layer = 0;
  RmsNorm input_norm{c->dim, c->eps}, post_attention_norm{c->dim, c->eps};
  Gqa attention{c->attention, layer};
  std::optional<SwigluFeedForward> dense =
      make_if<SwigluFeedForward>(c->dense[layer], c->dim, c->dense_hidden);
  std::optional<MoeFeedForward> moe =
      make_if<MoeFeedForward>(!c->dense[layer], c->moe, layer);
  FIELDS(input_norm, post_attention_norm, attention, dense, moe);

  Tensor operator()(const Tensor& x_TD, Context& ctx) const;
};

struct GqaLm {
  SharedGqaLmConfig c;
  Embedding embed{c->vocabulary, c->dim, c->padding_id};
  Layers<GqaDecoderLayer> layers = make_layers(c);
  RmsNorm norm{c->dim, c->eps};
  std::optional<Linear> head =
      make_if<Linear>(!c->tied_head, c->dim, c->vocabulary);
  FIELDS(embed, layers, norm, head);

  LanguageModelLoss loss(const Batch& batch, Context& ctx) const;
  Tensor logits(const Tensor& ids_T, Context& ctx) const;
  Tensor forward(const Tensor& ids_T, Context& ctx) const;
  const Parameter& head_weight() const {
    return head ? head->weight : embed.weight;
  }
  void prepare(Context& ctx) const;
  // What layers of a pass over `tokens` tokens could offload: all, or those of
  // a stage.
  std::vector<LayerCall> layer_calls(int64_t tokens) const;
  std::vector<LayerCall> layer_calls(int64_t tokens,
                                     const StageParts& parts) const;
  std::vector<NamedTensor> named_tensors();
  // Tensors that files may repeat.
  std::vector<TensorCopy> copies() const;

  // --- In parts, for pipeline stages, as of MlaLm.
  StageResult run(const StageParts& parts, const StageState& in,
                  const Batch& batch, Context& ctx) const;
  StageCut cut_after(const Layout& layout, int stage) const;
  std::vector<NamedTensor> named_tensors(const Layout& layout, int stage);
  SharedWeights shared_embedding(const Layout& layout) const;
  int total_layers() const { return static_cast<int>(c->layers); }
  int64_t selected_keys() const { return 0; }

  // The layers [first, first + count), by global number.
  Tensor run_layers(Tensor x_TD, int first, int count, Context& ctx) const;

  static Layers<GqaDecoderLayer> make_layers(const SharedGqaLmConfig& c);

 private:
  Tensor head_loss(const Tensor& normed_TD, const Batch& batch) const;
};

}  // namespace tapeline
