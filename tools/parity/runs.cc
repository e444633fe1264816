#include "tools/parity/runs.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "autograd/tape.h"
#include "runtime/status.h"
#include "tools/parity/margins.h"
#include "tools/parity/run.h"
#include "tools/train/load_model.h"

namespace tapeline {
namespace internal {

absl::StatusOr<Model> Run::load(IndexerTraining indexer) const {
  ModelChoices choices;
  choices.mtp_depths = golden.mtp_depths;
  choices.mtp_after_norm = golden.mtp_after_norm;
  choices.indexer = indexer;
  choices.absorbed = options.absorbed;
  ASSIGN_OR_RETURN(Model model,
                   load_language_model(options.model, choices, options.dtype));
  RETURN_IF_ERROR(check_ids(*model));
  return model;
}

absl::Status Run::check_ids(const LanguageModel& model) const {
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

double number(const Tensor& x) { return values_of(x, ValueKind::kScalar).v[0]; }
Values scalars(std::vector<double> v, ValueKind kind) {
  const auto n = static_cast<int64_t>(v.size());
  return {kind, {n}, std::move(v)};
}

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

namespace {

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

}  // namespace

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

}  // namespace internal

absl::StatusOr<Computed> compute(const Golden& golden,
                                 const ComputeOptions& options) {
  internal::Run run{golden, options};
  Computed computed;
  absl::Status status;
  if (golden.kind == "indexer_kl") {
    status = internal::run_indexer(run);
  } else if (golden.kind == "router_aux") {
    status = internal::run_router(run);
  } else if (golden.kind == "adamw_after") {
    status = internal::run_adamw(run);
  } else {
    status = internal::run_main(run);
  }
  RETURN_IF_ERROR(status);
  computed.values = std::move(run.out);
  computed.rows_tied = run.rows_tied;
  computed.extra_gradients = std::move(run.extra_gradients);
  return computed;
}

}  // namespace tapeline
