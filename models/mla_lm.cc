#include "models/mla_lm.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "autograd/checkpoint.h"
#include "autograd/dropped_outputs.h"
#include "autograd/mode.h"
#include "autograd/observer.h"
#include "autograd/offload.h"
#include "runtime/check.h"

namespace tapeline {
namespace {

// Use sites, in the order gradients of shared parameters are added up: the main
// stack, its head, then per prediction depth its layer and its head.
constexpr int kHeadSite = 1;
int mtp_site(int depth) { return 2 + 2 * depth; }
int mtp_head_site(int depth) { return 3 + 2 * depth; }

const std::vector<NameRule>& layer_rules() {
  static const std::vector<NameRule>& rules = *new std::vector<NameRule>{
      {"input_norm.weight", {"input_layernorm.weight"}},
      {"post_attention_norm.weight", {"post_attention_layernorm.weight"}},
      {"attention.mla.q_a.weight", {"self_attn.q_a_proj.weight"}},
      {"attention.mla.q_a_norm.weight", {"self_attn.q_a_layernorm.weight"}},
      {"attention.mla.q_b.weight", {"self_attn.q_b_proj.weight"}},
      {"attention.mla.kv_a.weight", {"self_attn.kv_a_proj_with_mqa.weight"}},
      {"attention.mla.kv_a_norm.weight", {"self_attn.kv_a_layernorm.weight"}},
      {"attention.mla.kv_b.weight", {"self_attn.kv_b_proj.weight"}},
      {"attention.mla.o.weight", {"self_attn.o_proj.weight"}},
      {"attention.indexer.q_b.weight", {"self_attn.indexer.wq_b.weight"}},
      {"attention.indexer.k.weight", {"self_attn.indexer.wk.weight"}},
      {"attention.indexer.k_norm.weight", {"self_attn.indexer.k_norm.weight"}},
      {"attention.indexer.k_norm.bias", {"self_attn.indexer.k_norm.bias"}},
      {"attention.indexer.weights.weight",
       {"self_attn.indexer.weights_proj.weight"}},
      {"dense.gate_up", {"mlp.gate_proj.weight", "mlp.up_proj.weight"}},
      {"dense.down.weight", {"mlp.down_proj.weight"}},
      {"moe.router.weight", {"mlp.gate.weight"}},
      {"moe.router.bias", {"mlp.gate.e_score_correction_bias"}},
      {"moe.experts.gate_up",
       {"mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"}},
      {"moe.experts.down", {"mlp.experts.{e}.down_proj.weight"}},
      {"moe.shared.gate_up",
       {"mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight"}},
      {"moe.shared.down.weight", {"mlp.shared_experts.down_proj.weight"}},
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

const std::vector<NameRule>& mtp_rules() {
  static const std::vector<NameRule>& rules = *new std::vector<NameRule>{
      {"enorm.weight", {"enorm.weight"}},
      {"hnorm.weight", {"hnorm.weight"}},
      {"eh_proj.weight", {"eh_proj.weight"}},
      {"norm.weight", {"shared_head.norm.weight"}},
  };
  return rules;
}

}  // namespace

LatentAttention make_attention(const MlaLmConfig& c, int layer) {
  return {.c = c.mla(),
          .index_config = {c.dim, c.query_rank, c.index_heads, c.index_dim,
                           c.rope_dim, c.index_top_k},
          .layer = layer,
          .sparse = c.sparse,
          .owns_indexer = static_cast<bool>(c.full_index[layer]),
          .training = c.indexer_training,
          .absorbed = c.absorbed,
          .reuses_given = layer >= c.layers};
}

LayerState DecoderLayer::operator()(const LayerState& in, Context& ctx) const {
  DroppedOutputs dropped(ctx.drop_norms);
  Tensor h_TD;
  std::optional<DsaSelection> selected;
  {
    LayerScope scope("self_attn");
    const AttentionOutput a =
        attention(dropped(input_norm, in.hidden_TD), in.selected, ctx);
    h_TD = in.hidden_TD + observe("attn_out", a.hidden_TD);
    selected = a.selected;
  }
  LayerScope scope("mlp");
  const Tensor n_TD = dropped(post_attention_norm, h_TD);
  const Tensor y_TD = moe ? (*moe)(n_TD, ctx) : (*dense)(n_TD);
  return {h_TD + observe("mlp_out", y_TD), selected};
}

LayerState MtpLayer::operator()(const MtpInput& in, Context& ctx) const {
  const Tensor u_TD = observe(
      "mtp_in",
      eh_proj(concat({enorm(in.embedded_TD), hnorm(in.previous.hidden_TD)})));
  const LayerState out = block({u_TD, in.previous.selected}, ctx);
  return {norm(observe("mtp_hidden", out.hidden_TD)), out.selected};
}

Layers<DecoderLayer> MlaLm::make_layers(const SharedMlaLmConfig& c) {
  Layers<DecoderLayer> layers;
  for (int i = 0; i < c->layers; ++i) layers.items.push_back({c, i});
  return layers;
}

std::vector<MtpLayer> MlaLm::make_mtp(const SharedMlaLmConfig& c) {
  std::vector<MtpLayer> mtp;
  for (int i = 0; i < c->mtp_layers; ++i) {
    mtp.push_back({c, static_cast<int>(c->layers) + i});
  }
  return mtp;
}

void MlaLm::prepare(Context& ctx) const {
  ctx.rope = rope_table(c->rope, ctx.sequence.position_T);
  ctx.index_rope = rope_table(c->index_rope, ctx.sequence.position_T);
}

LayerState MlaLm::run_layers(LayerState x, int first, int count,
                             Context& ctx) const {
  for (int i = first; i < first + count; ++i) {
    const DecoderLayer& layer =
        layers.items[static_cast<size_t>(i - layers.first)];
    LayerScope scope("layers", i);
    const OffloadWindow window(ctx.offload, layer.layer, {x.hidden_TD},
                               {x.selected ? x.selected->ids_TK : Tensor()});
    x = checkpoint(ctx.policy(layer.layer), layer, x, ctx);
    x.hidden_TD = observe("hidden", x.hidden_TD);
  }
  return x;
}

LayerState MlaLm::forward(const Tensor& ids_T, Context& ctx) const {
  return run_layers({observe("embed_out", embed(ids_T)), std::nullopt},
                    layers.first, static_cast<int>(layers.items.size()), ctx);
}

Tensor MlaLm::logits(const Tensor& ids_T, Context& ctx) const {
  return linear(norm(forward(ids_T, ctx).hidden_TD), head_weight());
}

bool MlaLm::depth_shares(int depth) const {
  const LatentAttention& attention =
      mtp[static_cast<size_t>(layer_of_depth(depth))].block.attention;
  return c->share_index_across_mtp || !attention.indexer;
}

LayerState MlaLm::run_depth(int d, LayerState state, const MtpTargets& targets,
                            Context& ctx) const {
  CHECK(!mtp.empty()) << "a batch with prediction targets needs an MTP layer";
  const MtpLayer& layer = mtp[static_cast<size_t>(layer_of_depth(d))];
  if (!depth_shares(d)) state.selected.reset();
  UseSite site(mtp_site(d));
  LayerScope scope("mtp", d);
  // Depths after the first reuse depth 0's selection when told to; the main
  // stack's is never used here.
  return checkpoint(ctx.policy(layer.layer), layer,
                    MtpInput{embed(targets.ids_T), state}, ctx);
}

Tensor MlaLm::head_loss(const Tensor& normed_TD, const Batch& batch) const {
  UseSite site(kHeadSite);
  LayerScope scope("lm_head");
  return linear_cross_entropy(normed_TD, head_weight(), batch.label_T,
                              batch.weight_T)
      .loss;
}

Tensor MlaLm::depth_loss(int d, const Tensor& hidden_TD,
                         const MtpTargets& targets) const {
  UseSite site(mtp_head_site(d));
  LayerScope scope("mtp_head", d);
  return linear_cross_entropy(hidden_TD, head_weight(), targets.label_T,
                              targets.weight_T)
      .loss;
}

LanguageModelLoss MlaLm::loss(const Batch& batch, Context& ctx) const {
  LanguageModelLoss out;
  const Tensor last_TD = forward(batch.ids_T, ctx).hidden_TD;
  const Tensor normed_TD = observe("final_norm_out", norm(last_TD));
  out.lm = head_loss(normed_TD, batch);
  out.total = out.lm;
  LayerState state{c->mtp_after_norm ? normed_TD : last_TD, std::nullopt};
  for (int d = 0; d < static_cast<int>(batch.mtp.size()); ++d) {
    state = run_depth(d, state, batch.mtp[d], ctx);
    out.mtp.push_back(depth_loss(d, state.hidden_TD, batch.mtp[d]));
    out.total = out.total + out.mtp.back();
  }
  return out;
}

StageResult MlaLm::run(const StageParts& parts, const StageState& in,
                       const Batch& batch, Context& ctx) const {
  StageResult out{in, std::nullopt};
  LayerState x{in.hidden_TD, in.selected};
  if (parts.embedding) {
    x = {observe("embed_out", embed(batch.ids_T)), std::nullopt};
  }
  x = run_layers(std::move(x), parts.first_layer, parts.layers, ctx);
  std::vector<Tensor>& depths_TD = out.state.depths_TD;
  if (parts.depths > 0 && parts.first_depth == 0) {
    x.selected.reset();
    if (norm_before_depths()) {
      x.hidden_TD = observe("final_norm_out", norm(x.hidden_TD));
    }
  }
  // A batch without their targets runs no depths.
  const int depths = batch.mtp.empty() ? 0 : parts.depths;
  for (int d = parts.first_depth; d < parts.first_depth + depths; ++d) {
    const LayerState state =
        run_depth(d, {d == 0 ? x.hidden_TD : depths_TD.back(), x.selected},
                  batch.mtp[d], ctx);
    depths_TD.push_back(state.hidden_TD);
    x.selected = state.selected;
  }
  if (parts.head) {
    LanguageModelLoss& loss = out.loss.emplace();
    if (!norm_before_depths()) {
      x.hidden_TD = observe("final_norm_out", norm(x.hidden_TD));
    }
    loss.total = loss.lm = head_loss(x.hidden_TD, batch);
    for (int d = 0; d < static_cast<int>(depths_TD.size()); ++d) {
      loss.mtp.push_back(depth_loss(d, depths_TD[d], batch.mtp[d]));
      loss.total = loss.total + loss.mtp.back();
    }
  }
  out.state.hidden_TD = x.hidden_TD;
  out.state.selected = x.selected;
  return out;
}

StageCut MlaLm::cut_after(const Layout& layout, int stage) const {
  StageCut cut;
  for (int s = 0; s <= stage; ++s) {
    const StageParts& parts = layout[s];
    if (parts.head) return {};
    cut.hidden |= parts.embedding;
    cut.depths += parts.depths;
  }
  if (!c->sparse || !cut.hidden) return cut;
  // Who comes next?
  for (size_t s = static_cast<size_t>(stage) + 1; s < layout.size(); ++s) {
    const StageParts& parts = layout[s];
    if (parts.layers > 0) {
      cut.selected = parts.first_layer > 0 && !c->full_index[parts.first_layer];
      return cut;
    }
    if (parts.depths > 0) {
      cut.selected = parts.first_depth > 0 && depth_shares(parts.first_depth);
      return cut;
    }
    if (parts.head) return cut;
  }
  return cut;
}

namespace {

template <class Part>
void add_leaves(Part& part, std::set<const void*>& out) {
  visit_leaves(part, [&](auto& leaf) { out.insert(&leaf); });
}

bool has_norm(const Layout& layout, int stage, bool before_depths) {
  const StageParts& parts = layout[stage];
  return before_depths ? parts.depths > 0 && parts.first_depth == 0
                       : parts.head;
}

}  // namespace

std::vector<NamedTensor> MlaLm::named_tensors(const Layout& layout, int stage) {
  const StageParts& parts = layout[stage];
  std::set<const void*> owned;
  if (parts.embedding || parts.depths > 0 || (parts.head && !head)) {
    add_leaves(embed, owned);
  }
  for (int i = parts.first_layer; i < parts.first_layer + parts.layers; ++i) {
    add_leaves(layers.items[static_cast<size_t>(i - layers.first)], owned);
  }
  for (int d = parts.first_depth; d < parts.first_depth + parts.depths; ++d) {
    add_leaves(mtp[static_cast<size_t>(layer_of_depth(d))], owned);
  }
  if (has_norm(layout, stage, norm_before_depths())) add_leaves(norm, owned);
  if (parts.head) {
    if (head) add_leaves(*head, owned);
    for (size_t i = c->mtp_depths; i < mtp.size(); ++i) {
      add_leaves(mtp[i], owned);
    }
  }
  std::vector<NamedTensor> all = named_tensors();
  std::erase_if(all, [&](const NamedTensor& t) {
    return owned.count(t.parameter) + owned.count(t.buffer) == 0;
  });
  return all;
}

SharedWeights MlaLm::shared_embedding(const Layout& layout) const {
  SharedWeights out;
  for (int s = 0; s < static_cast<int>(layout.size()); ++s) {
    const StageParts& parts = layout[s];
    std::vector<int> sites;
    if (parts.embedding) sites.push_back(0);
    for (int d = parts.first_depth; d < parts.first_depth + parts.depths; ++d) {
      sites.push_back(mtp_site(d));
    }
    if (parts.head && !head) {
      sites.push_back(kHeadSite);
      for (int d = 0; d < c->mtp_depths; ++d) {
        sites.push_back(mtp_head_site(d));
      }
    }
    if (sites.empty()) continue;
    out.stages.push_back(s);
    out.sites.push_back(std::move(sites));
  }
  return out;
}

void MlaLm::apply_training_choices() {
  visit(*this, [&](const std::string& path, auto& leaf) {
    if constexpr (std::is_same_v<decltype(leaf), Parameter&>) {
      if (leaf.defined() && path.find(".indexer.") != std::string::npos) {
        leaf.set_trainable(c->indexer_training != IndexerTraining::kFrozen);
      }
    }
  });
  // Prediction layers that no depth of this run reaches keep their values: an
  // optimizer would decay them.
  for (int i = c->mtp_depths; i < c->mtp_layers; ++i) {
    for (auto& [path, parameter] : parameters(mtp[i])) {
      if (parameter->defined()) parameter->set_trainable(false);
    }
  }
}

std::vector<LayerCall> MlaLm::layer_calls(int64_t tokens) const {
  return layer_calls(tokens, {.first_layer = layers.first,
                              .layers = static_cast<int>(layers.items.size())});
}

std::vector<LayerCall> MlaLm::layer_calls(int64_t tokens,
                                          const StageParts& parts) const {
  const std::vector<int> sources =
      c->sparse ? selection_sources(c->full_index) : std::vector<int>();
  std::vector<LayerCall> calls;
  for (int i = parts.first_layer; i < parts.first_layer + parts.layers; ++i) {
    const DecoderLayer& layer =
        layers.items[static_cast<size_t>(i - layers.first)];
    const auto element =
        static_cast<int64_t>(size_of(layer.input_norm.weight.value().dtype()));
    LayerCall call{layer.layer, tokens * c->dim * element};
    if (c->sparse) {
      call.ids_bytes = tokens * c->index_top_k * 4;
      call.source = sources[static_cast<size_t>(layer.layer)];
    }
    calls.push_back(call);
  }
  return calls;
}

std::vector<NamedTensor> MlaLm::named_tensors() {
  NameTable names;
  names.add("", "", model_rules());
  for (int i = 0; i < c->layers; ++i) {
    names.add("layers." + std::to_string(i) + ".",
              "model.layers." + std::to_string(i) + ".", layer_rules());
  }
  for (int i = 0; i < c->mtp_layers; ++i) {
    const std::string path = "mtp." + std::to_string(i) + ".";
    const std::string hf =
        "model.layers." + std::to_string(c->layers + i) + ".";
    names.add(path, hf, mtp_rules());
    names.add(path + "block.", hf, layer_rules());
  }
  return name_tensors(*this, names);
}

std::vector<TensorCopy> MlaLm::copies() const {
  std::vector<TensorCopy> copies;
  const std::string embed = "model.embed_tokens.weight";
  if (c->tied_head) {
    copies.push_back({"lm_head.weight", embed, "tie_word_embeddings is true"});
  }
  const std::string head = c->tied_head ? embed : "lm_head.weight";
  for (int i = 0; i < c->mtp_layers; ++i) {
    const std::string layer =
        "model.layers." + std::to_string(c->layers + i) + ".";
    const std::string why = "num_nextn_predict_layers shares them";
    copies.push_back({layer + "embed_tokens.weight", embed, why});
    copies.push_back({layer + "shared_head.head.weight", head, why});
  }
  return copies;
}

}  // namespace tapeline
