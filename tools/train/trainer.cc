#include "tools/train/trainer.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "autograd/checkpoint.h"
#include "autograd/tape.h"
#include "kernels/aux_loss/aux_loss.h"
#include "runtime/access.h"
#include "runtime/check.h"
#include "runtime/profile.h"
#include "runtime/status.h"
#include "tools/train/state_hash.h"

namespace tapeline {
namespace {

double value_of(const Tensor& number) {
  if (number.dtype() == DType::kF64) return number.to_vector<double>()[0];
  return number.to_vector<float>()[0];
}

double sum_of(const std::vector<Tensor>& numbers) {
  double sum = 0;
  for (const Tensor& number : numbers) sum += value_of(number);
  return sum;
}

std::vector<OptimizedTensor> optimized(const LanguageModel& model,
                                       const std::vector<NamedTensor>& all) {
  std::vector<OptimizedTensor> out;
  for (const NamedTensor& t : all) {
    if (t.parameter == nullptr || !t.parameter->trainable()) continue;
    out.push_back(
        {t.name, t.shape, t.offset, *t.parameter, model.muon_rows(t)});
  }
  return out;
}

// What the rate of a step depends on.
Json to_json(const LearningRate& rate) {
  Json json;
  json["kind"] = name_of(rate.kind);
  json["lr"] = rate.lr;
  json["warmup_steps"] = rate.warmup_steps;
  if (rate.kind == LearningRate::Kind::kConstant) return json;
  json["min_lr"] = rate.min_lr;
  json["total_steps"] = rate.total_steps;
  if (rate.kind != LearningRate::Kind::kWsd) return json;
  json["decay_steps"] = rate.decay_steps;
  return json;
}

// A master is the fp32 value of its tensor and has that one's name.
std::string state_name(const OptimizerState& state) {
  if (state.kind == "master") return state.name;
  return absl::StrCat("optimizer.", std::string(state.kind), ".", state.name);
}

}  // namespace

Trainer::Trainer(LanguageModel& model, TrainerOptions options,
                 BatchFunction batches)
    : Trainer(model, std::move(options), std::move(batches),
              model.named_tensors()) {}

Trainer::Trainer(LanguageModel& model, TrainerOptions options,
                 BatchFunction batches, std::vector<NamedTensor> tensors)
    : model_(model),
      options_(std::move(options)),
      batches_(std::move(batches)),
      tensors_(sorted_by_name(std::move(tensors))),
      optimizer_(optimized(model, tensors_), options_.optimizer) {}

StepRecord Trainer::step(bool hash) {
  const ProfileRange range(Range::kStep);
  ++step_;
  grads_.zero();
  for (auto& [layer, counts] : expert_counts_) counts.clear();
  std::vector<HostBatch> batches;
  for (int64_t m = 0; m < options_.micro_batches; ++m) {
    const ProfileRange data(Range::kData);
    batches.push_back(batches_(step_, m));
  }
  const Denominators n = count_targets(batches, model_.mtp_depths());
  StepRecord record;
  record.step = step_;
  const int64_t replays = checkpoint_counters().replays;
  const OffloadCounters moved = offload_counters_;
  // Read when all is queued, so that the host waits once.
  std::vector<Leftover> leftovers;
  for (const HostBatch& batch : batches) {
    leftovers.push_back(run_micro_batch(batch, n));
  }
  for (const Leftover& left : leftovers) read_back(left, record);
  record.replays = checkpoint_counters().replays - replays;
  record.offload_bytes = offload_counters_.copied_bytes - moved.copied_bytes;
  record.offload_exposed_ms =
      1000 * (offload_counters_.exposed_seconds - moved.exposed_seconds);
  record.pinned_bytes = Device::current().pinned().stats().reserved;
  record.loss = record.lm_loss + record.mtp_loss + record.balance_loss +
                record.z_loss + record.indexer_loss;
  tokens_ += n.tokens;
  record.tokens = tokens_;
  record.lr = options_.learning_rate.at(step_);
  if (hash) record.grad_hash = gradient_hash(optimizer_, grads_);
  StepReport report;
  {
    const ProfileRange update(Range::kOptimizer);
    report = optimizer_.step(grads_, record.lr, record.loss);
  }
  record.grad_norm = report.grad_norm;
  record.skipped = optimizer_.skipped();
  last_skipped_ = report.skipped;
  if (!report.skipped) update_router_biases();
  if (hash) record.param_hash = parameter_hash(tensors_);
  // Optimizer state and sums are there, so a step has all it ever needs.
  if (steps_here_ < 2 && ++steps_here_ == 2) Device::current().pool().settle();
  return record;
}

Trainer::Leftover Trainer::run_micro_batch(const HostBatch& host,
                                           const Denominators& n) {
  Context ctx;
  ctx.sequence = Sequence::packed(host.cu_seqlens);
  ctx.recompute = options_.recompute;
  ctx.keep = options_.keep;
  ctx.drop_norms = options_.drop_norms;
  std::optional<OffloadGraph> offload;
  if (options_.offload.activations || options_.offload.ids) {
    offload.emplace(
        plan_windows(model_.layer_calls(static_cast<int64_t>(host.ids.size())),
                     options_.offload),
        options_.strict_offload);
    ctx.offload = &*offload;
  }
  const double share =
      static_cast<double>(host.ids.size()) / static_cast<double>(n.tokens);
  ctx.weights = {
      .balance = options_.loss.balance * share,
      .z = options_.loss.z * share,
      .indexer = options_.loss.indexer / static_cast<double>(n.tokens)};
  model_.prepare(ctx);
  const Batch batch =
      make_batch(host, n, options_.loss.mtp_weight, DType::kF32);
  std::optional<AnomalyScope> anomaly;
  if (options_.anomaly) anomaly.emplace();
  Leftover left;
  {
    auto [loss, tape] = tapeline::record([&] {
      const ProfileRange forward(Range::kForward);
      return model_.loss(batch, ctx);
    });
    left.lm = loss.lm.detach();
    for (const Tensor& mtp : loss.mtp) left.mtp.push_back(mtp.detach());
    const ProfileRange backward(Range::kBackward);
    tape.backward(loss.total, grads_);
  }
  if (offload) finish_offload(*offload);
  if (anomaly && anomaly->first() && !anomaly_) anomaly_ = anomaly->first();
  left.weights = ctx.weights;
  left.statistics = std::move(ctx.statistics);
  return left;
}

void Trainer::finish_offload(const OffloadGraph& graph) {
  offload_counters_ += graph.counters();
  if (offload_status_.ok()) offload_status_ = graph.status();
  if (step_ > options_.offload_warmup_steps) return;
  // The first pass touches memory for the first time.
  if (step_ > 1) offload_timing_.add(graph);
  if (step_ == options_.offload_warmup_steps) {
    options_.offload.layers = offload_timing_.layers_that_hide(graph.plan());
  }
}

void Trainer::read_back(const Leftover& left, StepRecord& record) {
  record.lm_loss += value_of(left.lm);
  record.mtp_loss += sum_of(left.mtp);
  for (const auto& [layer, of] : left.statistics) {
    record.balance_loss += left.weights.balance * sum_of(of.balance_loss);
    record.z_loss += left.weights.z * sum_of(of.z_loss);
    record.indexer_loss += sum_of(of.indexer_loss);  // weighted per row
    for (const Tensor& counts_E : of.expert_counts_E) {
      const std::vector<int64_t> counts = counts_E.to_vector<int64_t>();
      std::vector<int64_t>& sum = expert_counts_[layer];
      sum.resize(counts.size());
      for (size_t e = 0; e < counts.size(); ++e) sum[e] += counts[e];
    }
  }
}

void Trainer::update_router_biases() {
  if (options_.loss.router_bias_rate == 0) return;
  for (const auto& [layer, counts] : expert_counts_) {
    Buffer* bias = model_.router_bias(layer);
    if (bias == nullptr || counts.empty()) continue;
    const Tensor counts_E =
        Tensor::from(counts, {static_cast<int64_t>(counts.size())});
    update_router_bias(launch(), read<int64_t>(counts_E),
                       options_.loss.router_bias_rate,
                       write<float>(bias->value()));
  }
}

SnapshotContents Trainer::contents(HostTensors& host) const {
  std::set<std::string> masters;
  for (const OptimizerState& s : optimizer_.state()) {
    host.add(state_name(s), s.value);
    if (s.kind == "master") masters.insert(s.name);
  }
  for (const NamedTensor& t : tensors_) {
    if (!masters.contains(t.name)) host.add(t.name, t.value());
  }
  SnapshotContents contents;
  contents.step = step_;
  contents.tensors = host.list();
  contents.layout["ranks"] = 1;
  contents.state["step"] = step_;
  contents.state["tokens"] = tokens_;
  contents.state["updates"] = optimizer_.updates();
  contents.state["skipped"] = optimizer_.skipped();
  contents.state["schedule"] = to_json(options_.learning_rate);
  return contents;
}

absl::Status Trainer::restore(const Snapshot& snapshot,
                              std::vector<std::string>* notes) {
  const auto count = [&](const char* key) -> absl::StatusOr<int64_t> {
    const Json* value = snapshot.state.find(key);
    if (value == nullptr || !value->is_integer()) {
      return absl::DataLossError(absl::StrCat(
          snapshot.path, "/state.json lacks the integer '", key, "'"));
    }
    return value->integer();
  };
  ASSIGN_OR_RETURN(step_, count("step"));
  ASSIGN_OR_RETURN(tokens_, count("tokens"));
  ASSIGN_OR_RETURN(const int64_t updates, count("updates"));
  ASSIGN_OR_RETURN(const int64_t skipped, count("skipped"));
  optimizer_.set_counts(updates, skipped);
  for (const OptimizerState& s : optimizer_.state()) {
    ASSIGN_OR_RETURN(const Tensor saved,
                     snapshot.tensors->read_tensor(state_name(s)));
    if (!(saved.shape() == s.value.shape()) ||
        saved.dtype() != s.value.dtype()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", state_name(s), " is ", describe(saved), " in ",
          snapshot.path, ", the model config wants ", describe(s.value)));
    }
    s.value.assign(saved.to_vector<float>());
  }
  optimizer_.publish();
  const Json* planned = snapshot.state.find("schedule");
  const Json now = to_json(options_.learning_rate);
  if (planned != nullptr && !(*planned == now)) {
    notes->push_back(absl::StrCat(
        "the learning rates are those of the config, ", now.dump(),
        ", not those the snapshot was trained with, ", planned->dump()));
  }
  return absl::OkStatus();
}

}  // namespace tapeline
