#include "models/config_reader.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "runtime/edit_distance.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

constexpr std::string_view kKnownKeys[] = {
    "architectures",
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "decoder_sparse_step",
    "dtype",
    "eos_token_id",
    "ep_size",
    "first_k_dense_replace",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "index_head_dim",
    "index_n_heads",
    "index_share_for_mtp_iteration",
    "index_skip_topk_offset",
    "index_topk",
    "index_topk_freq",
    "index_topk_pattern",
    "indexer_rope_interleave",
    "indexer_types",
    "initializer_range",
    "intermediate_size",
    "kv_lora_rank",
    "max_position_embeddings",
    "mlp_bias",
    "mlp_layer_types",
    "mlp_only_layers",
    "model_type",
    "moe_intermediate_size",
    "moe_layer_freq",
    "moe_router_dtype",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "num_nextn_predict_layers",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "q_lora_rank",
    "qk_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "rms_norm_eps",
    "rope_interleave",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "routed_scaling_factor",
    "router_aux_loss_coef",
    "scoring_func",
    "sliding_window",
    "tie_word_embeddings",
    "topk_group",
    "topk_method",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "use_sliding_window",
    "v_head_dim",
    "vocab_size",
};

}  // namespace

absl::Status check_known_keys(const Json& json) {
  const std::vector<std::string> known(std::begin(kKnownKeys),
                                       std::end(kKnownKeys));
  for (const auto& [key, value] : json.object()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("unknown key 'model.", key, "'", suggestion(key, known)));
  }
  return absl::OkStatus();
}

absl::Status ConfigReader::error(const std::string& what) const {
  return absl::InvalidArgumentError(absl::StrCat("model config: ", what));
}

const Json* ConfigReader::find(const char* key) const {
  const Json* value = json_.find(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

absl::StatusOr<int64_t> ConfigReader::integer(const char* key, int64_t fallback,
                                              int64_t least,
                                              int64_t most) const {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_integer()) {
    return error(absl::StrCat(key, " is ", value->dump(), ", not an integer"));
  }
  if (value->integer() < least) {
    return error(absl::StrCat(key, " is ", value->integer(),
                              ", the least allowed is ", least));
  }
  if (value->integer() > most) {
    return error(absl::StrCat(key, " is ", value->integer(),
                              ", the most allowed is ", most));
  }
  return value->integer();
}

absl::StatusOr<int64_t> ConfigReader::aliased(
    std::initializer_list<const char*> keys, int64_t fallback, int64_t least,
    int64_t most) const {
  const char* first = nullptr;
  int64_t found = fallback;
  for (const char* key : keys) {
    if (find(key) == nullptr) continue;
    ASSIGN_OR_RETURN(const int64_t value, integer(key, fallback, least, most));
    if (first != nullptr && value != found) {
      return error(absl::StrCat(first, " is ", found, ", but ", key, " is ",
                                value, "; they are one thing"));
    }
    if (first == nullptr) first = key;
    found = value;
  }
  return found;
}

absl::StatusOr<double> ConfigReader::number(const char* key,
                                            double fallback) const {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_number()) {
    return error(absl::StrCat(key, " is ", value->dump(), ", not a number"));
  }
  if (!std::isfinite(value->number())) {
    return error(absl::StrCat(key, " is not finite"));
  }
  return value->number();
}

absl::StatusOr<double> ConfigReader::positive(const char* key,
                                              double fallback) const {
  ASSIGN_OR_RETURN(const double value, number(key, fallback));
  if (!(value > 0)) {
    return error(absl::StrCat(key, " is ", value, ", it must be positive"));
  }
  return value;
}

absl::StatusOr<bool> ConfigReader::boolean(const char* key,
                                           bool fallback) const {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) {
    return error(
        absl::StrCat(key, " is ", value->dump(), ", not true or false"));
  }
  return value->boolean();
}

absl::StatusOr<std::string> ConfigReader::string(
    const char* key, const std::string& fallback) const {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_string()) {
    return error(absl::StrCat(key, " is ", value->dump(), ", not a string"));
  }
  return value->string();
}

absl::StatusOr<std::vector<std::string>> ConfigReader::strings(
    const char* key) const {
  std::vector<std::string> out;
  const Json* value = find(key);
  if (value == nullptr) return out;
  if (!value->is_array()) {
    return error(absl::StrCat(key, " is ", value->dump(), ", not a list"));
  }
  for (const Json& item : value->array()) {
    if (!item.is_string()) {
      return error(absl::StrCat(key, " holds ", item.dump(), ", not a string"));
    }
    out.push_back(item.string());
  }
  return out;
}

absl::StatusOr<std::vector<int64_t>> ConfigReader::integers(
    const char* key) const {
  std::vector<int64_t> out;
  const Json* value = find(key);
  if (value == nullptr) return out;
  if (value->is_integer()) return std::vector<int64_t>{value->integer()};
  if (!value->is_array()) {
    return error(absl::StrCat(key, " is ", value->dump(),
                              ", not an integer or a list of them"));
  }
  for (const Json& item : value->array()) {
    if (!item.is_integer()) {
      return error(
          absl::StrCat(key, " holds ", item.dump(), ", not an integer"));
    }
    out.push_back(item.integer());
  }
  return out;
}

absl::StatusOr<RopeConfig> ConfigReader::rope(int64_t dim) const {
  RopeConfig rope;
  rope.dim = dim;
  ASSIGN_OR_RETURN(rope.theta, number("rope_theta", rope.theta));
  const auto above_one = [&]() -> absl::Status {
    if (rope.theta > 1) return absl::OkStatus();
    return error(
        absl::StrCat("rope_theta is ", rope.theta, ", it must be above 1"));
  };
  const Json* object = find("rope_parameters");
  const Json* old = find("rope_scaling");
  if (object != nullptr && old != nullptr && !(*object == *old)) {
    return error(absl::StrCat("rope_parameters is ", object->dump(),
                              ", but rope_scaling is ", old->dump()));
  }
  if (object == nullptr) object = old;
  if (object == nullptr) {
    RETURN_IF_ERROR(above_one());
    return rope;
  }
  if (!object->is_object()) {
    return error(
        absl::StrCat("rope_parameters is ", object->dump(), ", not an object"));
  }
  const ConfigReader r(*object);
  ASSIGN_OR_RETURN(const double theta, r.number("rope_theta", rope.theta));
  if (find("rope_theta") != nullptr && theta != rope.theta) {
    return error(absl::StrCat("rope_theta is ", rope.theta,
                              ", but rope_parameters.rope_theta is ", theta));
  }
  rope.theta = theta;
  RETURN_IF_ERROR(above_one());
  ASSIGN_OR_RETURN(const std::string old_type, r.string("type", "default"));
  ASSIGN_OR_RETURN(const std::string type, r.string("rope_type", old_type));
  if (type == "default") return rope;
  ASSIGN_OR_RETURN(rope.factor, r.number("factor", 1));
  ASSIGN_OR_RETURN(
      rope.original_max_position,
      r.integer("original_max_position_embeddings", 0, 0, int64_t{1} << 31));
  if (!(rope.factor >= 1) || rope.original_max_position == 0) {
    return error(absl::StrCat("rope type ", type, " wants factor >= 1 and ",
                              "original_max_position_embeddings > 0, they are ",
                              rope.factor, " and ",
                              rope.original_max_position));
  }
  if (type == "llama3") {
    rope.scaling = RopeConfig::Scaling::kLlama3;
    ASSIGN_OR_RETURN(rope.low_freq_factor, r.positive("low_freq_factor", 1));
    ASSIGN_OR_RETURN(rope.high_freq_factor, r.positive("high_freq_factor", 4));
    if (rope.high_freq_factor <= rope.low_freq_factor) {
      return error(absl::StrCat("high_freq_factor is ", rope.high_freq_factor,
                                ", but low_freq_factor is ",
                                rope.low_freq_factor));
    }
    return rope;
  }
  if (type == "yarn") {
    rope.scaling = RopeConfig::Scaling::kYarn;
    ASSIGN_OR_RETURN(rope.beta_fast, r.positive("beta_fast", 32));
    ASSIGN_OR_RETURN(rope.beta_slow, r.positive("beta_slow", 1));
    ASSIGN_OR_RETURN(rope.truncate, r.boolean("truncate", true));
    ASSIGN_OR_RETURN(const double mscale, r.number("mscale", 0));
    ASSIGN_OR_RETURN(const double all_dim, r.number("mscale_all_dim", 0));
    // arXiv 2309.00071: attention grows with the logarithm of the factor;
    // DeepSeek splits it between the rotation and the softmax.
    const auto grown = [&](double m) {
      return rope.factor <= 1 ? 1 : 0.1 * m * std::log(rope.factor) + 1;
    };
    const double rotation =
        mscale != 0 && all_dim != 0 ? grown(mscale) / grown(all_dim) : grown(1);
    ASSIGN_OR_RETURN(rope.attention_factor,
                     r.positive("attention_factor", rotation));
    if (all_dim != 0) rope.softmax_factor = grown(all_dim) * grown(all_dim);
    return rope;
  }
  return error(absl::StrCat("rope_type is '", type,
                            "'; known are default, llama3 and yarn"));
}

absl::Status ConfigReader::refuse_true(
    std::initializer_list<const char*> keys) const {
  for (const char* key : keys) {
    ASSIGN_OR_RETURN(const bool value, boolean(key, false));
    if (value) {
      return error(absl::StrCat(key, " is true, which is not supported"));
    }
  }
  return absl::OkStatus();
}

}  // namespace tapeline
