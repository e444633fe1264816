// A decoder-only language model of latent attention, over all keys or selected
// ones, and feed-forward layers that are dense or mixtures of experts, with
// multi-token prediction: GLM-5.2 and DeepSeek-V3. A family is a configuration
// (glm_moe_dsa.h, deepseek_v3.h).
//
// Shape suffixes: T tokens, D model, V vocabulary.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "autograd/memory_plan.h"
#include "dist/pipeline/layout.h"
#include "models/batch.h"
#include "models/context.h"
#include "models/latent_attention.h"
#include "models/layers.h"
#include "models/mla_lm_config.h"
#include "models/moe.h"
#include "models/stage_state.h"
#include "models/weights.h"

namespace tapeline {

using SharedMlaLmConfig = std::shared_ptr<const MlaLmConfig>;

// What travels from layer to layer, and between pipeline stages.
struct LayerState {
  Tensor hidden_TD;
  std::optional<DsaSelection> selected;
  FIELDS(hidden_TD, selected);
};

LatentAttention make_attention(const MlaLmConfig& c, int layer);

struct DecoderLayer {
  SharedMlaLmConfig c;
  int layer = 0;
  RmsNorm input_norm{c->dim, c->eps}, post_attention_norm{c->dim, c->eps};
  LatentAttention attention = make_attention(*c, layer);
  std::optional<SwigluFeedForward> dense =
      make_if<SwigluFeedForward>(c->dense[layer], c->dim, c->dense_hidden);
  std::optional<MoeFeedForward> moe =
      make_if<MoeFeedForward>(!c->dense[layer], c->moe(), layer);
  FIELDS(input_norm, post_attention_norm, attention, dense, moe);

  LayerState operator()(const LayerState& in, Context& ctx) const;
};

struct MtpInput {
  Tensor embedded_TD;
  LayerState previous;
  FIELDS(embedded_TD, previous);
};

// One prediction layer: combines the previous depth's hidden state with the
// embedding of the token after next.
struct MtpLayer {
  SharedMlaLmConfig c;
  int layer = 0;
  RmsNorm enorm{c->dim, c->eps}, hnorm{c->dim, c->eps};
  Linear eh_proj{2 * c->dim, c->dim};  // embedding columns first
  DecoderLayer block{c, layer};
  RmsNorm norm{c->dim, c->eps};  // shared_head.norm
  FIELDS(enorm, hnorm, eh_proj, block, norm);

  LayerState operator()(const MtpInput& in, Context& ctx) const;
};

struct MlaLm {
  SharedMlaLmConfig c;
  Embedding embed{c->vocabulary, c->dim, c->padding_id};
  Layers<DecoderLayer> layers = make_layers(c);
  RmsNorm norm{c->dim, c->eps};
  std::optional<Linear> head =
      make_if<Linear>(!c->tied_head, c->dim, c->vocabulary);
  std::vector<MtpLayer> mtp = make_mtp(c);
  FIELDS(embed, layers, norm, head, mtp);

  // The weighted losses of a micro-batch; run backward from `total`.
  LanguageModelLoss loss(const Batch& batch, Context& ctx) const;
  // Logits of every token; with ctx.cache, of the new tokens.
  Tensor logits(const Tensor& ids_T, Context& ctx) const;

  // Hidden states after the layers, before the final norm.
  LayerState forward(const Tensor& ids_T, Context& ctx) const;
  const Parameter& head_weight() const {
    return head ? head->weight : embed.weight;
  }
  // Rope tables for ctx.sequence; call before any forward.
  void prepare(Context& ctx) const;
  // What decoder layers of a pass over `tokens` tokens could offload: all, or
  // those of a stage.
  std::vector<LayerCall> layer_calls(int64_t tokens) const;
  std::vector<LayerCall> layer_calls(int64_t tokens,
                                     const StageParts& parts) const;
  // Hugging Face names of all parameters and buffers.
  std::vector<NamedTensor> named_tensors();
  // Tensors that files may repeat.
  std::vector<TensorCopy> copies() const;
  // Freezes what this run does not train, of the parameters that have values.
  void apply_training_choices();

  // --- In parts, for pipeline stages. A rank has a whole model of which only
  // the parameters of its stages are given values.
  // Runs a stage's parts on what the stage before handed on.
  StageResult run(const StageParts& parts, const StageState& in,
                  const Batch& batch, Context& ctx) const;
  // Between `stage` and the next.
  StageCut cut_after(const Layout& layout, int stage) const;
  // Parameters and buffers of a stage. The embedding is also that of stages
  // with prediction depths, and with a tied head. Prediction layers that no
  // depth reaches are the head's.
  std::vector<NamedTensor> named_tensors(const Layout& layout, int stage);
  SharedWeights shared_embedding(const Layout& layout) const;
  int total_layers() const { return c->total_layers(); }
  int64_t selected_keys() const { return c->sparse ? c->index_top_k : 0; }

  // The decoder layers [first, first + count), by global number.
  LayerState run_layers(LayerState x, int first, int count, Context& ctx) const;

  static Layers<DecoderLayer> make_layers(const SharedMlaLmConfig& c);
  static std::vector<MtpLayer> make_mtp(const SharedMlaLmConfig& c);

 private:
  int layer_of_depth(int depth) const {  // of mtp
    return std::min(depth, static_cast<int>(mtp.size()) - 1);
  }
  // Whether a depth takes over the selection of the one before.
  bool depth_shares(int depth) const;
  LayerState run_depth(int depth, LayerState state, const MtpTargets& targets,
                       Context& ctx) const;
  Tensor head_loss(const Tensor& normed_TD, const Batch& batch) const;
  Tensor depth_loss(int depth, const Tensor& hidden_TD,
                    const MtpTargets& targets) const;
  // Depth 1 sees the normed state: then the first depth's stage has the norm.
  bool norm_before_depths() const {
    return c->mtp_after_norm && c->mtp_depths > 0;
  }
};

}  // namespace tapeline
