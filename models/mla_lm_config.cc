#include "models/mla_lm_config.h"

#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "models/config_reader.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

// What the kernels take (kernels/*/*.h); models do not see those headers.
constexpr int64_t kMostLayers = 4096, kMostExperts = 1024, kMostPerToken = 64,
                  kMostSelected = 8192, kMostKeyDim = 640;

// full(i) of the IndexCache rule: arXiv 2603.12201.
bool full_by_rule(int64_t layer, int64_t frequency, int64_t offset) {
  return std::max<int64_t>(layer - offset + 1, 0) % frequency == 0;
}

absl::Status read_index_types(ConfigReader& r, MlaLmConfig& c) {
  const int total = c.total_layers();
  c.full_index.assign(total, true);
  const auto fill = [&](const std::vector<bool>& types) {
    // Lists may leave the MTP layers out: those own an indexer.
    for (size_t i = 0; i < types.size(); ++i) c.full_index[i] = types[i];
  };
  const auto check_size = [&](const char* key, size_t size) {
    if (size == static_cast<size_t>(c.layers) ||
        size == static_cast<size_t>(total)) {
      return absl::OkStatus();
    }
    return r.error(absl::StrCat(
        key, " has ", size, " entries, but ", "num_hidden_layers is ", c.layers,
        c.mtp_layers > 0 ? absl::StrCat(" (or ", total, " with MTP)")
                         : std::string()));
  };
  ASSIGN_OR_RETURN(const std::vector<std::string> types,
                   r.strings("indexer_types"));
  ASSIGN_OR_RETURN(const std::string pattern,
                   r.string("index_topk_pattern", ""));
  ASSIGN_OR_RETURN(const int64_t frequency, r.integer("index_topk_freq", 1, 1));
  ASSIGN_OR_RETURN(const int64_t offset,
                   r.integer("index_skip_topk_offset", c.index_offset, 0));
  if (!types.empty()) {
    RETURN_IF_ERROR(check_size("indexer_types", types.size()));
    std::vector<bool> full;
    for (const std::string& type : types) {
      if (type != "full" && type != "shared") {
        return r.error(absl::StrCat("indexer_types has '", type,
                                    "'; use \"full\" or \"shared\""));
      }
      full.push_back(type == "full");
    }
    fill(full);
  } else if (!pattern.empty()) {
    RETURN_IF_ERROR(check_size("index_topk_pattern", pattern.size()));
    std::vector<bool> full;
    for (char type : pattern) {
      if (type != 'F' && type != 'S') {
        return r.error(absl::StrCat("index_topk_pattern has '",
                                    std::string(1, type), "'; use F and S"));
      }
      full.push_back(type == 'F');
    }
    fill(full);
  } else {
    for (int i = 0; i < total; ++i) {
      c.full_index[i] = full_by_rule(i, frequency, offset);
    }
    if (c.mtp_layers > 0) c.full_index[c.layers] = true;
  }
  if (!c.full_index[0]) {
    return r.error(
        "layer 0 shares an index selection, but no layer is before "
        "it; make its indexer type \"full\"");
  }
  if (c.mtp_layers > 0 && !c.full_index[c.layers]) {
    return r.error(absl::StrCat("the first MTP layer (", c.layers,
                                ") shares an index selection, but MTP never "
                                "uses the main layers'; make it \"full\""));
  }
  return absl::OkStatus();
}

absl::Status read_mlp_types(ConfigReader& r, MlaLmConfig& c) {
  ASSIGN_OR_RETURN(const int64_t first,
                   r.integer("first_k_dense_replace", c.first_dense, 0));
  ASSIGN_OR_RETURN(const std::vector<std::string> types,
                   r.strings("mlp_layer_types"));
  c.dense.assign(c.total_layers(), false);
  for (int64_t i = 0; i < c.layers && i < first; ++i) c.dense[i] = true;
  if (types.empty()) return absl::OkStatus();
  if (types.size() != static_cast<size_t>(c.layers) &&
      types.size() != static_cast<size_t>(c.total_layers())) {
    return r.error(absl::StrCat("mlp_layer_types has ", types.size(),
                                " entries, but num_hidden_layers is ",
                                c.layers));
  }
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] != "dense" && types[i] != "sparse") {
      return r.error(absl::StrCat("mlp_layer_types has '", types[i],
                                  "'; use \"dense\" or \"sparse\""));
    }
    c.dense[i] = types[i] == "dense";
  }
  return absl::OkStatus();
}

absl::Status read_experts(ConfigReader& r, MlaLmConfig& c) {
  ASSIGN_OR_RETURN(c.experts, r.aliased({"n_routed_experts", "num_experts",
                                         "num_local_experts"},
                                        c.experts, 1, kMostExperts));
  ASSIGN_OR_RETURN(
      c.experts_per_token,
      r.integer("num_experts_per_tok", c.experts_per_token, 1, kMostPerToken));
  ASSIGN_OR_RETURN(c.shared_experts,
                   r.integer("n_shared_experts", c.shared_experts, 0));
  ASSIGN_OR_RETURN(c.groups, r.integer("n_group", c.groups, 1));
  ASSIGN_OR_RETURN(c.top_groups, r.integer("topk_group", c.top_groups, 1));
  ASSIGN_OR_RETURN(c.normalize_weights,
                   r.boolean("norm_topk_prob", c.normalize_weights));
  ASSIGN_OR_RETURN(c.routed_scale,
                   r.number("routed_scaling_factor", c.routed_scale));
  ASSIGN_OR_RETURN(const std::string score,
                   r.string("scoring_func", "sigmoid"));
  if (score != "sigmoid") {
    return r.error(absl::StrCat("scoring_func is '", score,
                                "'; this model family uses \"sigmoid\""));
  }
  if (c.experts % c.groups != 0) {
    return r.error(absl::StrCat("n_routed_experts is ", c.experts,
                                ", which n_group ", c.groups,
                                " does not divide"));
  }
  if (c.top_groups > c.groups) {
    return r.error(absl::StrCat("topk_group is ", c.top_groups,
                                ", but n_group is ", c.groups));
  }
  const int64_t choosable = c.experts / c.groups * c.top_groups;
  if (c.experts_per_token > choosable) {
    return r.error(absl::StrCat(
        "num_experts_per_tok is ", c.experts_per_token, ", but only ",
        choosable, " of n_routed_experts ", c.experts, " can be chosen"));
  }
  return absl::OkStatus();
}

absl::Status read_attention(ConfigReader& r, MlaLmConfig& c) {
  ASSIGN_OR_RETURN(c.heads, r.integer("num_attention_heads", c.heads, 1));
  ASSIGN_OR_RETURN(const int64_t key_heads,
                   r.integer("num_key_value_heads", c.heads, 1));
  if (key_heads != c.heads) {
    return r.error(absl::StrCat("num_key_value_heads is ", key_heads,
                                ", but num_attention_heads is ", c.heads,
                                "; latent attention has no key groups"));
  }
  ASSIGN_OR_RETURN(c.query_rank, r.integer("q_lora_rank", c.query_rank, 1));
  ASSIGN_OR_RETURN(c.latent_rank,
                   r.integer("kv_lora_rank", c.latent_rank, 1, kMostKeyDim));
  ASSIGN_OR_RETURN(c.nope_dim, r.integer("qk_nope_head_dim", c.nope_dim, 1));
  ASSIGN_OR_RETURN(c.rope_dim,
                   r.integer("qk_rope_head_dim", c.rope_dim, 2, kMostKeyDim));
  ASSIGN_OR_RETURN(c.value_dim, r.integer("v_head_dim", c.value_dim, 1));
  ASSIGN_OR_RETURN(const int64_t qk,
                   r.integer("qk_head_dim", c.nope_dim + c.rope_dim, 1));
  if (qk != c.nope_dim + c.rope_dim) {
    return r.error(absl::StrCat("qk_head_dim is ", qk,
                                ", but qk_nope_head_dim + qk_rope_head_dim is ",
                                c.nope_dim + c.rope_dim));
  }
  if (c.latent_rank + c.rope_dim > kMostKeyDim) {
    return r.error(absl::StrCat("kv_lora_rank + qk_rope_head_dim is ",
                                c.latent_rank + c.rope_dim,
                                ", the most allowed is ", kMostKeyDim));
  }
  // Plain attention over selected keys has value and key side by side.
  const int64_t head = c.nope_dim + c.rope_dim;
  if (head > kMostKeyDim || c.value_dim > kMostKeyDim ||
      (c.sparse && head + c.value_dim > kMostKeyDim)) {
    return r.error(absl::StrCat(
        "heads are too wide: qk_nope_head_dim + "
        "qk_rope_head_dim is ",
        head, " and v_head_dim is ", c.value_dim, ", the most allowed is ",
        kMostKeyDim, c.sparse ? " together" : " each"));
  }
  if (c.rope_dim % 2 != 0) {
    return r.error(
        absl::StrCat("qk_rope_head_dim is ", c.rope_dim, ", which is odd"));
  }
  const bool index_pairs = c.index_rope.interleaved;
  ASSIGN_OR_RETURN(c.rope, r.rope(c.rope_dim));
  c.index_rope = c.rope;
  ASSIGN_OR_RETURN(c.rope.interleaved, r.boolean("rope_interleave", true));
  ASSIGN_OR_RETURN(c.index_rope.interleaved,
                   r.boolean("indexer_rope_interleave", index_pairs));
  return r.refuse_true({"attention_bias", "mlp_bias"});
}

absl::Status read_indexer(ConfigReader& r, MlaLmConfig& c) {
  ASSIGN_OR_RETURN(c.index_heads, r.integer("index_n_heads", c.index_heads, 1));
  ASSIGN_OR_RETURN(c.index_dim,
                   r.integer("index_head_dim", c.index_dim, 2, kMostKeyDim));
  ASSIGN_OR_RETURN(const int64_t top_k,
                   r.integer("index_topk", c.index_top_k, 1, kMostSelected));
  c.index_top_k = static_cast<int>(top_k);
  if (c.index_dim < c.rope_dim) {
    return r.error(absl::StrCat("index_head_dim is ", c.index_dim,
                                ", less than qk_rope_head_dim ", c.rope_dim));
  }
  return read_index_types(r, c);
}

}  // namespace

absl::StatusOr<MlaLmConfig> MlaLmConfig::parse_shared(const Json& json,
                                                      MlaLmConfig defaults) {
  ConfigReader r(json);
  MlaLmConfig c = std::move(defaults);
  c.hf = json;
  ASSIGN_OR_RETURN(c.vocabulary, r.integer("vocab_size", c.vocabulary, 1));
  ASSIGN_OR_RETURN(c.dim, r.integer("hidden_size", c.dim, 1));
  ASSIGN_OR_RETURN(c.layers,
                   r.integer("num_hidden_layers", c.layers, 1, kMostLayers));
  ASSIGN_OR_RETURN(c.dense_hidden,
                   r.integer("intermediate_size", c.dense_hidden, 1));
  ASSIGN_OR_RETURN(c.expert_hidden,
                   r.integer("moe_intermediate_size", c.expert_hidden, 1));
  ASSIGN_OR_RETURN(c.eps, r.positive("rms_norm_eps", c.eps));
  ASSIGN_OR_RETURN(const int64_t mtp,
                   r.integer("num_nextn_predict_layers", 0, 0, kMostLayers));
  c.mtp_layers = static_cast<int>(mtp);
  c.mtp_depths = c.mtp_layers;
  ASSIGN_OR_RETURN(c.tied_head, r.boolean("tie_word_embeddings", false));
  ASSIGN_OR_RETURN(c.initializer_std, r.number("initializer_range", 0.02));
  if (c.initializer_std < 0) {
    return r.error(absl::StrCat("initializer_range is ", c.initializer_std,
                                ", it must not be negative"));
  }
  ASSIGN_OR_RETURN(c.padding_id, r.integer("pad_token_id", -1, -1));
  if (c.padding_id >= c.vocabulary) {
    return r.error(absl::StrCat("pad_token_id is ", c.padding_id,
                                ", but vocab_size is ", c.vocabulary));
  }
  ASSIGN_OR_RETURN(c.eos_ids, r.integers("eos_token_id"));
  ASSIGN_OR_RETURN(c.share_index_across_mtp,
                   r.boolean("index_share_for_mtp_iteration", true));
  RETURN_IF_ERROR(read_attention(r, c));
  RETURN_IF_ERROR(read_experts(r, c));
  RETURN_IF_ERROR(read_mlp_types(r, c));
  if (c.sparse) {
    RETURN_IF_ERROR(read_indexer(r, c));
  } else {
    c.full_index.assign(c.total_layers(), false);
    c.absorbed = false;  // wider heads and nothing saved
  }
  ASSIGN_OR_RETURN(const std::string activation,
                   r.string("hidden_act", "silu"));
  if (activation != "silu") {
    return r.error(absl::StrCat("hidden_act is '", activation,
                                "'; only \"silu\" exists here"));
  }
  return c;
}

MlaConfig MlaLmConfig::mla() const {
  MlaConfig m;
  m.dim = dim;
  m.heads = heads;
  m.query_rank = query_rank;
  m.latent_rank = latent_rank;
  m.nope_dim = nope_dim;
  m.rope_dim = rope_dim;
  m.value_dim = value_dim;
  m.latent_eps = 1e-6;  // not rms_norm_eps: class default in transformers
  // YaRN sharpens the softmax by mscale_all_dim as well (DeepSeek-V3).
  m.softmax_scale =
      rope.softmax_factor / std::sqrt(static_cast<double>(m.query_dim()));
  return m;
}

MoeConfig MlaLmConfig::moe() const {
  MoeConfig m;
  m.dim = dim;
  m.experts = experts;
  m.hidden = expert_hidden;
  m.shared_hidden = expert_hidden * shared_experts;
  m.rule = {.sigmoid = true,
            .top_k = static_cast<int>(experts_per_token),
            .groups = static_cast<int>(groups),
            .top_groups = static_cast<int>(top_groups),
            .normalize = normalize_weights,
            .scale = routed_scale};
  m.has_bias = true;
  m.balance = balance;
  return m;
}

}  // namespace tapeline
