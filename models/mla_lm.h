// A decoder-only language model of latent attention, over all keys or selected
// ones, and feed-forward layers that are dense or mixtures of experts, with
// multi-token prediction: GLM-5.2 and DeepSeek-V3. A family is a configuration
// (glm_moe_dsa.h, deepseek_v3.h).
//
// Shape suffixes: T tokens, D model, V vocabulary.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "autograd/memory_plan.h"
#include "models/batch.h"
#include "models/context.h"
#include "models/latent_attention.h"
#include "models/layers.h"
#include "models/mla_lm_config.h"
#include "models/moe.h"
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
  // What the decoder layers of a pass over `tokens` tokens could offload.
  std::vector<LayerCall> layer_calls(int64_t tokens) const;
  // Hugging Face names of all parameters and buffers.
  std::vector<NamedTensor> named_tensors();
  // Tensors that files may repeat.
  std::vector<TensorCopy> copies() const;
  // Freezes what this run does not train.
  void apply_training_choices();

  static Layers<DecoderLayer> make_layers(const SharedMlaLmConfig& c);
  static std::vector<MtpLayer> make_mtp(const SharedMlaLmConfig& c);
};

}  // namespace tapeline
