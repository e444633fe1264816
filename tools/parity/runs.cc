#include "tools/parity/runs.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "autograd/tape.h"
#include "runtime/status.h"
#include "tools/parity/margins.h"
#include "tools/parity/recorder.h"
#include "tools/train/load_model.h"
#include "tools/train/trainer.h"

namespace tapeline {
namespace {

using Model = std::unique_ptr<LanguageModel>;

struct Run {
  const Golden& golden;
  const ComputeOptions& options;
  NamedValues out = {};
  int64_t rows_tied = 0;
  std::vector<std::string> extra_gradients = {};

  absl::StatusOr<Model> load(IndexerTraining indexer) const {
    ModelChoices choices;
    choices.mtp_depths = golden.mtp_depths;
    choices.mtp_after_norm = golden.mtp_after_norm;
    choices.indexer = indexer;
    choices.absorbed = options.absorbed;
    ASSIGN_OR_RETURN(Model model, load_language_model(options.model, choices,
                                                      options.dtype));
    RETURN_IF_ERROR(check_ids(*model));
    return model;
  }
  absl::Status check_ids(const LanguageModel& model) const {
    for (size_t t = 0; t < golden.batch.ids.size(); ++t) {
      const int32_t id = golden.batch.ids[t], label = golden.batch.labels[t];
      const int32_t wrong = id < 0 || id >= model.vocabulary() ? id
                            : label >= model.vocabulary()      ? label
                                                               : -1;
      if (wrong != -1 || (label < 0 && label != -100)) {
        return absl::InvalidArgumentError(absl::StrCat(
            golden.path, ": token ", t, " has id ", id, " and label ", label,
            ", the model's vocab_size is ", model.vocabulary()));
      }
    }
    return absl::OkStatus();
  }
};

double number(const Tensor& x) { return values_of(x, ValueKind::kScalar).v[0]; }
Values scalars(std::vector<double> v, ValueKind kind = ValueKind::kScalar) {
  const auto n = static_cast<int64_t>(v.size());
  return {kind, {n}, std::move(v)};
}

// Records the trainer's loss on the golden's batch, with everything an
// observer sees.
struct Pass {
  LanguageModelLoss loss;
  Context ctx;
  ParameterGradients grads;
};
absl::Status run_pass(Run& run, LanguageModel& model, double indexer_weight,
                      Pass& pass, Recorder& recorder) {
  const HostBatch& host = run.golden.batch;
  const Batch batch =
      make_batch(host, count_targets({host}, run.golden.mtp_depths),
                 run.golden.mtp_weight, accumulator_dtype(run.options.dtype));
  pass.ctx.sequence = Sequence::packed(host.cu_seqlens);
  pass.ctx.weights.indexer = indexer_weight;
  model.prepare(pass.ctx);
  const ObserverScope scope(recorder);
  auto [loss, tape] = record([&] { return model.loss(batch, pass.ctx); });
  RETURN_IF_ERROR(recorder.status());
  tape.backward(loss.total, pass.grads);
  pass.loss = std::move(loss);
  for (size_t d = 0; d < batch.mtp.size(); ++d) {
    run.out[absl::StrCat("mtp_tokens.", d)] =
        values_of(batch.mtp[d].ids_T, ValueKind::kExact);
    run.out[absl::StrCat("mtp_labels.", d)] =
        values_of(batch.mtp[d].label_T, ValueKind::kExact);
  }
  run.rows_tied += recorder.rows_tied();
  return recorder.status();
}

// Gradients under `prefix` for each of the golden's tensors that starts with
// it; those the golden lacks must be zero.
void add_gradients(Run& run, LanguageModel& model, ParameterGradients& grads,
                   const std::string& prefix, std::vector<std::string>* extra) {
  std::map<const Parameter*, Tensor> sums;
  for (const NamedTensor& t : model.named_tensors()) {
    if (t.parameter == nullptr) continue;
    const std::string key = prefix + t.name;
    const bool reached = grads.reached(*t.parameter);
    if (!reached) {
      // No gradient is a gradient of zero.
      if (run.golden.has(key)) {
        run.out[key] = {
            ValueKind::kGradient, t.shape,
            std::vector<double>(static_cast<size_t>(t.elements()), 0.0)};
      }
      continue;
    }
    Tensor& sum = sums[t.parameter];
    if (!sum) sum = grads.combined(*t.parameter);
    Values values = values_of(t.block(sum), ValueKind::kGradient);
    if (run.golden.has(key)) {
      run.out[key] = std::move(values);
    } else if (extra != nullptr &&
               std::any_of(values.v.begin(), values.v.end(),
                           [](double g) { return g != 0; })) {
      extra->push_back(key);
    }
  }
}

// Margins follow from scores and logits that were observed.
void add_margins(Run& run, LanguageModel& model, const NamedValues& observed) {
  for (const auto& [key, values] : observed) {
    const size_t scores = key.find("index_scores");
    if (scores != std::string::npos) {
      std::string name = key;
      name.replace(scores, 12, "index_margin");
      run.out[name] = index_margin(values, model.index_top_k());
    }
    const size_t logits = key.find("router_logits");
    if (logits == std::string::npos || key.starts_with("grad_")) continue;
    std::string name = key;
    name.replace(logits, 13, "router_margin");
    // "router_logits.3", or "mtp1.router_logits".
    int layer = 0, depth = 0;
    std::vector<double> bias;
    if (!absl::SimpleAtoi(name.substr(name.rfind('.') + 1), &layer) &&
        absl::SimpleAtoi(name.substr(3, name.find('.') - 3), &depth)) {
      layer = model.mtp_layer(depth);
    }
    if (const Buffer* b = model.router_bias(layer)) {
      bias = values_of(b->value(), ValueKind::kActivation).v;
    }
    run.out[name] = router_margin(values, bias, model.router_rule());
  }
}

absl::Status run_main(Run& run) {
  ASSIGN_OR_RETURN(const Model model, run.load(IndexerTraining::kFrozen));
  Recorder recorder(run.options.choices, run.golden.values);
  Pass pass;
  RETURN_IF_ERROR(run_pass(run, *model, 0, pass, recorder));
  run.out.insert(recorder.values().begin(), recorder.values().end());
  add_margins(run, *model, recorder.values());
  add_gradients(run, *model, pass.grads, "grad.", &run.extra_gradients);
  const double lm = number(pass.loss.lm);
  if (run.golden.mtp_depths == 0) {
    run.out["loss"] = run.out["loss_fp64"] = scalars({lm});
    return absl::OkStatus();
  }
  run.out["lm_loss"] = scalars({lm});
  std::vector<double> losses;
  double sum = 0;
  const double share = run.golden.mtp_weight / run.golden.mtp_depths;
  for (const Tensor& loss : pass.loss.mtp) {
    sum += number(loss);
    losses.push_back(share == 0 ? 0 : number(loss) / share);
  }
  run.out["mtp_losses"] = scalars(losses);
  run.out["mtp_loss"] = scalars({sum});
  return absl::OkStatus();
}

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

}  // namespace

absl::StatusOr<Computed> compute(const Golden& golden,
                                 const ComputeOptions& options) {
  Run run{golden, options};
  Computed computed;
  absl::Status status;
  if (golden.kind == "indexer_kl") {
    status = run_indexer(run);
  } else if (golden.kind == "router_aux") {
    status = run_router(run);
  } else if (golden.kind == "adamw_after") {
    status = run_adamw(run);
  } else {
    status = run_main(run);
  }
  RETURN_IF_ERROR(status);
  computed.values = std::move(run.out);
  computed.rows_tied = run.rows_tied;
  computed.extra_gradients = std::move(run.extra_gradients);
  return computed;
}

}  // namespace tapeline
