#include "models/gqa_lm.h"

#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "autograd/checkpoint.h"
#include "autograd/dropped_outputs.h"
#include "autograd/mode.h"
#include "autograd/observer.h"
#include "autograd/offload.h"
#include "models/config_reader.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

constexpr int kHeadSite = 1;  // the tied head adds after the embedding

const std::vector<NameRule>& layer_rules() {
  static const std::vector<NameRule>& rules = *new std::vector<NameRule>{
      {"input_norm.weight", {"input_layernorm.weight"}},
      {"post_attention_norm.weight", {"post_attention_layernorm.weight"}},
      {"attention.q.weight", {"self_attn.q_proj.weight"}},
      {"attention.k.weight", {"self_attn.k_proj.weight"}},
      {"attention.v.weight", {"self_attn.v_proj.weight"}},
      {"attention.o.weight", {"self_attn.o_proj.weight"}},
      {"attention.q_norm.weight", {"self_attn.q_norm.weight"}},
      {"attention.k_norm.weight", {"self_attn.k_norm.weight"}},
      {"dense.gate_up", {"mlp.gate_proj.weight", "mlp.up_proj.weight"}},
      {"dense.down.weight", {"mlp.down_proj.weight"}},
      {"moe.router.weight", {"mlp.gate.weight"}},
      {"moe.experts.gate_up",
       {"mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"}},
      {"moe.experts.down", {"mlp.experts.{e}.down_proj.weight"}},
  };
  return rules;
}

const std::vector<NameRule>& model_rules() {
  static const std::vector<NameRule>& rules = *new std::vector<NameRule>{
      {"embed.weight", {"model.embed_tokens.weight"}},
      {"norm.weight", {"model.norm.weight"}},
      {"head.weight", {"lm_head.weight"}},
  };
  return rules;
}

}  // namespace

absl::StatusOr<GqaLmConfig> GqaLmConfig::parse_shared(const Json& json) {
  const ConfigReader r(json);
  GqaLmConfig c;
  c.hf = json;
  ASSIGN_OR_RETURN(c.vocabulary, r.integer("vocab_size", 151936, 1));
  ASSIGN_OR_RETURN(c.dim, r.integer("hidden_size", 2048, 1));
  ASSIGN_OR_RETURN(c.layers, r.integer("num_hidden_layers", 24, 1, 4096));
  ASSIGN_OR_RETURN(c.dense_hidden, r.integer("intermediate_size", 6144, 1));
  ASSIGN_OR_RETURN(c.eps, r.positive("rms_norm_eps", 1e-6));
  ASSIGN_OR_RETURN(c.tied_head, r.boolean("tie_word_embeddings", false));
  ASSIGN_OR_RETURN(c.initializer_std, r.number("initializer_range", 0.02));
  ASSIGN_OR_RETURN(c.padding_id, r.integer("pad_token_id", -1, -1));
  ASSIGN_OR_RETURN(c.eos_ids, r.integers("eos_token_id"));
  if (c.padding_id >= c.vocabulary) {
    return r.error(absl::StrCat("pad_token_id is ", c.padding_id,
                                ", but vocab_size is ", c.vocabulary));
  }
  GqaConfig& a = c.attention;
  a.dim = c.dim;
  a.eps = c.eps;
  ASSIGN_OR_RETURN(a.heads, r.integer("num_attention_heads", 32, 1));
  ASSIGN_OR_RETURN(a.key_heads, r.integer("num_key_value_heads", a.heads, 1));
  if (a.heads % a.key_heads != 0) {
    return r.error(absl::StrCat("num_key_value_heads is ", a.key_heads,
                                ", which does not divide ",
                                "num_attention_heads ", a.heads));
  }
  ASSIGN_OR_RETURN(a.head_dim, r.integer("head_dim", c.dim / a.heads, 1, 640));
  if (a.head_dim % 2 != 0) {
    return r.error(absl::StrCat("head_dim is ", a.head_dim, ", which is odd"));
  }
  ASSIGN_OR_RETURN(c.rope, r.rope(a.head_dim));
  ASSIGN_OR_RETURN(const std::string activation,
                   r.string("hidden_act", "silu"));
  if (activation != "silu") {
    return r.error(absl::StrCat("hidden_act is '", activation,
                                "'; only \"silu\" exists here"));
  }
  RETURN_IF_ERROR(
      r.refuse_true({"attention_bias", "mlp_bias", "use_sliding_window"}));
  c.dense.assign(static_cast<size_t>(c.layers), true);
  return c;
}

Tensor GqaDecoderLayer::operator()(const Tensor& x_TD, Context& ctx) const {
  DroppedOutputs dropped(ctx.drop_norms);
  Tensor h_TD;
  {
    LayerScope scope("self_attn");
    h_TD =
        x_TD + observe("attn_out", attention(dropped(input_norm, x_TD), ctx));
  }
  LayerScope scope("mlp");
  const Tensor n_TD = dropped(post_attention_norm, h_TD);
  const Tensor y_TD = moe ? (*moe)(n_TD, ctx) : (*dense)(n_TD);
  return h_TD + observe("mlp_out", y_TD);
}

Layers<GqaDecoderLayer> GqaLm::make_layers(const SharedGqaLmConfig& c) {
  Layers<GqaDecoderLayer> layers;
  for (int i = 0; i < c->layers; ++i) layers.items.push_back({c, i});
  return layers;
}

void GqaLm::prepare(Context& ctx) const {
  ctx.rope = rope_table(c->rope, ctx.sequence.position_T);
}

Tensor GqaLm::run_layers(Tensor x_TD, int first, int count,
                         Context& ctx) const {
  for (int i = first; i < first + count; ++i) {
    LayerScope scope("layers", i);
    const GqaDecoderLayer& layer =
        layers.items[static_cast<size_t>(i - layers.first)];
    const OffloadWindow window(ctx.offload, layer.layer, {x_TD}, {});
    x_TD = observe("hidden",
                   checkpoint(ctx.policy(layer.layer), layer, x_TD, ctx));
  }
  return x_TD;
}

Tensor GqaLm::forward(const Tensor& ids_T, Context& ctx) const {
  return run_layers(observe("embed_out", embed(ids_T)), layers.first,
                    static_cast<int>(layers.items.size()), ctx);
}

Tensor GqaLm::logits(const Tensor& ids_T, Context& ctx) const {
  return linear(norm(forward(ids_T, ctx)), head_weight());
}

Tensor GqaLm::head_loss(const Tensor& normed_TD, const Batch& batch) const {
  UseSite site(kHeadSite);
  LayerScope scope("lm_head");
  return linear_cross_entropy(normed_TD, head_weight(), batch.label_T,
                              batch.weight_T)
      .loss;
}

LanguageModelLoss GqaLm::loss(const Batch& batch, Context& ctx) const {
  const Tensor loss = head_loss(
      observe("final_norm_out", norm(forward(batch.ids_T, ctx))), batch);
  return {loss, loss, {}};
}

StageResult GqaLm::run(const StageParts& parts, const StageState& in,
                       const Batch& batch, Context& ctx) const {
  StageResult out;
  Tensor x_TD = in.hidden_TD;
  if (parts.embedding) x_TD = observe("embed_out", embed(batch.ids_T));
  x_TD = run_layers(std::move(x_TD), parts.first_layer, parts.layers, ctx);
  if (parts.head) {
    const Tensor loss = head_loss(observe("final_norm_out", norm(x_TD)), batch);
    out.loss = LanguageModelLoss{loss, loss, {}};
  }
  out.state.hidden_TD = x_TD;
  return out;
}

StageCut GqaLm::cut_after(const Layout& layout, int stage) const {
  StageCut cut;
  for (int s = 0; s <= stage; ++s) {
    if (layout[s].head) return {};
    cut.hidden |= layout[s].embedding;
  }
  return cut;
}

std::vector<NamedTensor> GqaLm::named_tensors(const Layout& layout, int stage) {
  const StageParts& parts = layout[stage];
  std::set<const void*> owned;
  const auto add = [&](auto& part) {
    visit_leaves(part, [&](auto& leaf) { owned.insert(&leaf); });
  };
  if (parts.embedding || (parts.head && !head)) add(embed);
  for (int i = parts.first_layer; i < parts.first_layer + parts.layers; ++i) {
    add(layers.items[static_cast<size_t>(i - layers.first)]);
  }
  if (parts.head) {
    add(norm);
    if (head) add(*head);
  }
  std::vector<NamedTensor> all = named_tensors();
  std::erase_if(all, [&](const NamedTensor& t) {
    return owned.count(t.parameter) + owned.count(t.buffer) == 0;
  });
  return all;
}

SharedWeights GqaLm::shared_embedding(const Layout& layout) const {
  SharedWeights out;
  for (int s = 0; s < static_cast<int>(layout.size()); ++s) {
    std::vector<int> sites;
    if (layout[s].embedding) sites.push_back(0);
    if (layout[s].head && !head) sites.push_back(kHeadSite);
    if (sites.empty()) continue;
    out.stages.push_back(s);
    out.sites.push_back(std::move(sites));
  }
  return out;
}

std::vector<LayerCall> GqaLm::layer_calls(int64_t tokens) const {
  return layer_calls(tokens, {.first_layer = layers.first,
                              .layers = static_cast<int>(layers.items.size())});
}

std::vector<LayerCall> GqaLm::layer_calls(int64_t tokens,
                                          const StageParts& parts) const {
  std::vector<LayerCall> calls;
  for (int i = parts.first_layer; i < parts.first_layer + parts.layers; ++i) {
    const GqaDecoderLayer& layer =
        layers.items[static_cast<size_t>(i - layers.first)];
    const auto element =
        static_cast<int64_t>(size_of(layer.input_norm.weight.value().dtype()));
    calls.push_back({layer.layer, tokens * c->dim * element});
  }
  return calls;
}

std::vector<NamedTensor> GqaLm::named_tensors() {
  NameTable names;
  names.add("", "", model_rules());
  for (int i = 0; i < c->layers; ++i) {
    names.add("layers." + std::to_string(i) + ".",
              "model.layers." + std::to_string(i) + ".", layer_rules());
  }
  return name_tensors(*this, names);
}

std::vector<TensorCopy> GqaLm::copies() const {
  std::vector<TensorCopy> copies;
  const std::string embed = "model.embed_tokens.weight";
  if (c->tied_head) {
    copies.push_back({"lm_head.weight", embed, "tie_word_embeddings is true"});
  }
  return copies;
}

}  // namespace tapeline
