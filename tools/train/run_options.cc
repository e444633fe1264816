#include "tools/train/run_options.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "autograd/ops.h"
#include "models/config_reader.h"
#include "runtime/file.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

LearningRate learning_rate(const Config& c) {
  using Kind = LearningRate::Kind;
  const std::string& name = c.schedule.name;
  LearningRate rate;
  rate.kind = name == "linear"   ? Kind::kLinear
              : name == "cosine" ? Kind::kCosine
              : name == "wsd"    ? Kind::kWsd
                                 : Kind::kConstant;
  rate.lr = c.optimizer.lr;
  rate.min_lr = c.schedule.min_lr;
  rate.warmup_steps = c.schedule.warmup_steps;
  rate.total_steps = c.train.steps;
  rate.decay_steps = c.schedule.decay_steps;
  return rate;
}

}  // namespace

absl::Status check_settings(const Config& c) {
  const absl::Status rate = learning_rate(c).check();
  if (!rate.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(rate.message(), "; change schedule.* or optimizer.lr"));
  }
  const std::vector<std::string>& known = keepable_ops();
  for (const std::string& op : c.recompute.keep) {
    if (std::find(known.begin(), known.end(), op) == known.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("recompute.keep names '", op, "'; it may name ",
                       absl::StrJoin(known, ", ")));
    }
  }
  if (c.recompute.policy == "keep" && c.recompute.keep.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "recompute.policy = keep, but recompute.keep names no operation; give "
        "some of ",
        absl::StrJoin(known, ", "), ", or set the policy to full"));
  }
  if (c.recompute.policy != "keep" && !c.recompute.keep.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("recompute.keep has no effect under recompute.policy = ",
                     c.recompute.policy, "; set the policy to keep"));
  }
  if (c.recompute.drop_norms &&
      (c.recompute.policy == "full" || c.recompute.policy == "keep")) {
    return absl::InvalidArgumentError(absl::StrCat(
        "recompute.drop_norms has no effect under recompute.policy = ",
        c.recompute.policy,
        ", which recomputes every layer; remove it or change the policy"));
  }
  const int64_t first = c.debug.cuda_first, last = c.debug.cuda_last;
  if (last != 0 && (first == 0 || last < first)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "debug.cuda_last = ", last, ", but debug.cuda_first = ", first,
        "; give the steps from the first to the last"));
  }
  if (c.offload.warmup_steps == 1) {
    return absl::InvalidArgumentError(
        "offload.warmup_steps = 1: the first step is not typical; set it to 2 "
        "or more, or to 0");
  }
  return absl::OkStatus();
}

DType compute_dtype(const Config& c) {
  return c.compute_dtype == "bf16" ? DType::kBf16 : DType::kF32;
}

TrainerOptions trainer_options(const Config& c) {
  TrainerOptions o;
  o.micro_batches = c.train.micro_batches;
  o.loss = {.mtp_weight = c.loss.mtp_weight,
            .balance = c.loss.balance_coefficient,
            .z = c.loss.z_coefficient,
            .indexer = c.loss.indexer_coefficient,
            .router_bias_rate = c.loss.router_bias_rate};
  o.optimizer.kind = c.optimizer.name == "muon"
                         ? OptimizerOptions::Kind::kMuon
                         : OptimizerOptions::Kind::kAdamW;
  o.optimizer.adamw = {.beta1 = c.optimizer.beta1,
                       .beta2 = c.optimizer.beta2,
                       .eps = c.optimizer.eps,
                       .weight_decay = c.optimizer.weight_decay};
  o.optimizer.muon = {
      .momentum = c.optimizer.muon_momentum,
      .nesterov = c.optimizer.muon_nesterov,
      .iterations = static_cast<int>(c.optimizer.muon_iterations),
      .weight_decay = c.optimizer.weight_decay,
      .lr_ratio = c.optimizer.muon_lr > 0 && c.optimizer.lr > 0
                      ? c.optimizer.muon_lr / c.optimizer.lr
                      : 1};
  o.optimizer.max_norm = c.train.max_norm;
  o.learning_rate = learning_rate(c);
  o.anomaly = c.debug.anomaly;
  o.keep = c.recompute.keep;
  o.drop_norms = c.recompute.drop_norms;
  o.offload = {c.offload.activations, c.offload.ids, {}};
  o.strict_offload = c.offload.strict;
  o.offload_warmup_steps = c.offload.warmup_steps;
  return o;
}

absl::StatusOr<std::vector<bool>> recomputed_layers(const Config& c,
                                                    int layers) {
  const std::string& policy = c.recompute.policy;
  std::vector<bool> out(static_cast<size_t>(layers), false);
  for (int i = 0; i < layers; ++i) {
    // A share is spread evenly over the layers.
    const auto share = [&](int n) {
      return static_cast<int64_t>(std::floor(n * c.recompute.ratio + 1e-9));
    };
    out[static_cast<size_t>(i)] =
        policy == "full" || policy == "keep" ||
        (policy == "every_n" && (i + 1) % c.recompute.every == 0) ||
        (policy == "ratio" && share(i + 1) > share(i));
  }
  if (policy == "none" || std::find(out.begin(), out.end(), true) != out.end())
    return out;
  const bool every = policy == "every_n";
  return absl::InvalidArgumentError(absl::StrCat(
      "recompute.policy = ", policy, " recomputes none of ", layers,
      " layers; ",
      every ? absl::StrCat("lower recompute.every = ", c.recompute.every)
            : absl::StrCat("raise recompute.ratio = ", c.recompute.ratio),
      " or set the policy to none"));
}

ModelChoices model_choices(const Config& c) {
  ModelChoices choices;
  choices.mtp_depths = static_cast<int>(c.loss.mtp_depths);
  choices.mtp_after_norm = c.loss.mtp_after_norm;
  if (c.loss.indexer_coefficient > 0) {
    choices.indexer = IndexerTraining::kSelectedKeys;
  }
  using Kind = BalanceRule::Kind;
  const std::string& rule = c.loss.balance_rule;
  choices.balance.kind = rule == "softmax"          ? Kind::kSoftmax
                         : rule == "sigmoid_biased" ? Kind::kSigmoidBiased
                                                    : Kind::kSigmoid;
  return choices;
}

absl::StatusOr<Json> model_config(const Config& c,
                                  const std::string& model_path) {
  Json json = Json::Object();
  // A Hugging Face file may hold any key; one written by hand may not.
  RETURN_IF_ERROR(check_known_keys(c.model.keys));
  if (!model_path.empty()) {
    ASSIGN_OR_RETURN(json, read_json(join_path(model_path, "config.json")));
  }
  for (const auto& [key, value] : c.model.keys.object()) json[key] = value;
  if (json.object().empty()) {
    return absl::InvalidArgumentError(
        "the config describes no model; add a [model] table or model.path");
  }
  return json;
}

}  // namespace tapeline
