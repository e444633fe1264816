// Goldens of losses beside the main one, and of updates.
#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "autograd/ops.h"
#include "autograd/tape.h"
#include "runtime/status.h"
#include "tools/parity/run.h"
#include "tools/train/trainer.h"

namespace tapeline::internal {
namespace {

// Rows over selected keys as rows over all keys.
Values scattered(const Values& rows, const Values& ids, int64_t keys) {
  const auto tokens = static_cast<size_t>(rows.shape[0]);
  const auto width = static_cast<size_t>(rows.shape[1]);
  Values out{ValueKind::kAuxiliary, {rows.shape[0], keys}, {}};
  out.v.assign(tokens * static_cast<size_t>(keys), 0.0);
  for (size_t i = 0; i < tokens * width; ++i) {
    if (ids.v[i] < 0) continue;
    out.v[i / width * static_cast<size_t>(keys) +
          static_cast<size_t>(ids.v[i])] = rows.v[i];
  }
  return out;
}

absl::Status run_indexer_stage(Run& run, IndexerTraining training,
                               const std::string& stage) {
  ASSIGN_OR_RETURN(const Model model, run.load(training));
  const auto tokens = static_cast<int64_t>(run.golden.batch.ids.size());
  Recorder recorder(nullptr, run.golden.values);
  Pass pass;
  RETURN_IF_ERROR(
      run_pass(run, *model, 1.0 / static_cast<double>(tokens), pass, recorder));
  for (const auto& [layer, log] : pass.ctx.statistics) {
    if (log.indexer_loss.empty()) continue;
    run.out[absl::StrCat(stage, "loss.", layer)] =
        scalars({number(log.indexer_loss[0])}, ValueKind::kAuxiliary);
  }
  for (const auto& [key, values] : recorder.values()) {
    const std::string layer = key.substr(key.rfind('.') + 1);
    if (key.starts_with("index_ids.")) run.out[key] = values;
    if (key.starts_with("index_kl_rows.")) {
      run.out[absl::StrCat(stage, "kl_rows.", layer)] = values;
    }
    if (key.starts_with("index_target.")) {
      run.out[absl::StrCat(stage, "target.", layer)] = scattered(
          values, recorder.values().at("index_target_ids." + layer), tokens);
    }
  }
  std::vector<std::string> missing;
  add_gradients(run, *model, pass.grads, stage + "grad.", &missing);
  for (std::string& key : missing) {
    if (key.find(".indexer.") != std::string::npos) {
      run.extra_gradients.push_back(std::move(key));
    }
  }
  for (auto& [key, values] : run.out) {
    if (key.starts_with(stage + "grad.")) values.kind = ValueKind::kAuxiliary;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status run_indexer(Run& run) {
  const std::vector<int32_t>& cu = run.golden.batch.cu_seqlens;
  for (size_t s = 1; s < cu.size(); ++s) {
    constexpr int32_t kMost = 8192;  // of select_all_keys
    if (cu[s] - cu[s - 1] > kMost) {
      return absl::InvalidArgumentError(absl::StrCat(
          run.golden.path, ": a sequence of ", cu[s] - cu[s - 1],
          " tokens; the loss over all keys takes at most ", kMost));
    }
  }
  RETURN_IF_ERROR(
      run_indexer_stage(run, IndexerTraining::kSelectedKeys, "sparse."));
  return run_indexer_stage(run, IndexerTraining::kAllKeys, "dense.");
}

namespace {

// A loss of a router's logits alone, and its gradient.
template <class F>
void add_router_loss(Run& run, const std::string& name, int layer,
                     const Tensor& logits_TE, F&& loss_of) {
  Tape tape;
  const Tensor logits = tape.input(logits_TE);
  const Tensor loss = record(tape, [&] { return loss_of(logits); });
  ParameterGradients grads;
  const std::vector<Tensor> d = tape.backward(loss, grads);
  run.out[absl::StrCat(name, ".", layer)] =
      values_of(loss, ValueKind::kAuxiliary);
  run.out[absl::StrCat(name, ".grad_logits.", layer)] =
      values_of(d[0], ValueKind::kAuxiliary);
}

Tensor as_tensor(const Values& x) {
  return Tensor::from(std::vector<float>(x.v.begin(), x.v.end()), x.shape);
}
Tensor as_ids(const Values& x) {
  return Tensor::from(std::vector<int32_t>(x.v.begin(), x.v.end()), x.shape);
}

// The mean over sequences of the balance loss of each.
Tensor sequence_balance(const Tensor& logits, const Tensor& ids,
                        const std::vector<int32_t>& cu) {
  Tensor sum;
  int sequences = 0;
  for (size_t s = 1; s < cu.size(); ++s) {
    if (cu[s] == cu[s - 1]) continue;
    ++sequences;
    std::vector<uint8_t> inside(static_cast<size_t>(cu.back()), 0);
    std::fill(inside.begin() + cu[s - 1], inside.begin() + cu[s], 1);
    const Tensor loss =
        balance_loss(logits, {}, ids, Tensor::from(inside, {cu.back()}),
                     {BalanceRule::Kind::kSigmoid});
    sum = sum ? sum + loss : loss;
  }
  return scale(sum, 1.0 / sequences);
}

}  // namespace

absl::Status run_router(Run& run) {
  ASSIGN_OR_RETURN(const Model model, run.load(IndexerTraining::kFrozen));
  Recorder recorder(nullptr, run.golden.values);
  Pass pass;
  RETURN_IF_ERROR(run_pass(run, *model, 0, pass, recorder));
  for (const auto& [key, logits] : recorder.values()) {
    int layer = 0;
    if (!key.starts_with("router_logits.") ||
        !absl::SimpleAtoi(key.substr(14), &layer)) {
      continue;
    }
    const Values& ids =
        recorder.values().at(absl::StrCat("router_ids.", layer));
    run.out[key] = logits;
    run.out[absl::StrCat("router_ids.", layer)] = ids;
    const Tensor l = as_tensor(logits), expert_TK = as_ids(ids);
    add_router_loss(run, "zloss", layer, l,
                    [&](const Tensor& x) { return z_loss(x, {}); });
    add_router_loss(run, "bal_unbiased", layer, l, [&](const Tensor& x) {
      return balance_loss(x, {}, expert_TK, {}, {BalanceRule::Kind::kSigmoid});
    });
    add_router_loss(run, "bal_seqwise", layer, l, [&](const Tensor& x) {
      return sequence_balance(x, expert_TK, run.golden.batch.cu_seqlens);
    });
    const Buffer* bias = model->router_bias(layer);
    if (bias == nullptr) continue;
    run.out[absl::StrCat("bias_before.", layer)] =
        values_of(bias->value(), ValueKind::kAuxiliary);
    add_router_loss(run, "bal_biased", layer, l, [&](const Tensor& x) {
      return balance_loss(x, bias->value(), expert_TK, {},
                          {BalanceRule::Kind::kSigmoidBiased});
    });
  }
  // A step of the trainer that moves nothing but the biases.
  TrainerOptions options;
  options.loss.router_bias_rate = run.golden.router_bias_rate;
  Trainer trainer(*model, options,
                  [&](int64_t, int64_t) { return run.golden.batch; });
  trainer.step(/*hash=*/false);
  for (const auto& [layer, counts] : trainer.expert_counts()) {
    run.out[absl::StrCat("counts.", layer)] =
        scalars({counts.begin(), counts.end()}, ValueKind::kExact);
    if (const Buffer* bias = model->router_bias(layer)) {
      run.out[absl::StrCat("bias_after.", layer)] =
          values_of(bias->value(), ValueKind::kAuxiliary);
    }
  }
  return absl::OkStatus();
}

namespace {

// A number, or a text that starts with one after `before`.
absl::StatusOr<double> meta_number(const Golden& golden, const Json& from,
                                   const char* key, std::string_view before) {
  const Json* value = from.find(key);
  if (value != nullptr && value->is_number()) return value->number();
  if (value != nullptr && value->is_string()) {
    const std::string& text = value->string();
    const size_t begin = text.find(before);
    if (begin != std::string::npos) {
      const size_t first = begin + before.size();
      const size_t length = text.find_first_not_of("0123456789.e+-", first);
      double number = 0;
      if (absl::SimpleAtod(
              text.substr(
                  first, length == std::string::npos ? length : length - first),
              &number)) {
        return number;
      }
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the meta.json beside ", golden.path, " lacks adamw.", key));
}

}  // namespace

absl::Status run_adamw(Run& run) {
  const Json* adamw = run.golden.meta.find("adamw");
  const Json* curve = adamw == nullptr ? nullptr : adamw->find("curve");
  const Json* betas = adamw == nullptr ? nullptr : adamw->find("betas");
  if (curve == nullptr || !curve->is_array() || betas == nullptr ||
      !betas->is_array() || betas->array().size() != 2 ||
      !betas->array()[0].is_number() || !betas->array()[1].is_number()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the meta.json beside ", run.golden.path,
                     " lacks adamw.curve or adamw.betas"));
  }
  for (const Json& step : curve->array()) {
    for (const char* key : {"loss", "grad_norm"}) {
      const Json* value = step.find(key);
      if (value == nullptr || !value->is_number()) {
        return absl::InvalidArgumentError(
            absl::StrCat("the meta.json beside ", run.golden.path,
                         ": a step of adamw.curve has no number ", key));
      }
    }
  }
  TrainerOptions options;
  OptimizerOptions& o = options.optimizer;
  o.adamw.beta1 = betas->array()[0].number();
  o.adamw.beta2 = betas->array()[1].number();
  ASSIGN_OR_RETURN(o.adamw.eps, meta_number(run.golden, *adamw, "eps", ""));
  ASSIGN_OR_RETURN(o.adamw.weight_decay,
                   meta_number(run.golden, *adamw, "weight_decay", ""));
  ASSIGN_OR_RETURN(o.max_norm,
                   meta_number(run.golden, *adamw, "clip", "min(1, "));
  ASSIGN_OR_RETURN(options.learning_rate.lr,
                   meta_number(run.golden, *adamw, "lr", ""));
  ASSIGN_OR_RETURN(const Model model, run.load(IndexerTraining::kFrozen));
  Trainer trainer(*model, options,
                  [&](int64_t, int64_t) { return run.golden.batch; });
  for (size_t step = 0; step < curve->array().size(); ++step) {
    const StepRecord record = trainer.step(/*hash=*/false);
    run.out[absl::StrCat("curve.loss.", step)] =
        scalars({record.lm_loss}, ValueKind::kAuxiliary);
    run.out[absl::StrCat("curve.grad_norm.", step)] =
        scalars({record.grad_norm}, ValueKind::kAuxiliary);
  }
  for (const NamedTensor& t : model->named_tensors()) {
    const std::string key = "after." + t.name;
    if (run.golden.has(key)) {
      run.out[key] = values_of(t.value(), ValueKind::kAuxiliary);
    }
  }
  return absl::OkStatus();
}

}  // namespace tapeline::internal
