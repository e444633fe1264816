#include "tools/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "autograd/checkpoint.h"
#include "autograd/tape.h"
#include "kernels/aux_loss/aux_loss.h"
#include "kernels/elementwise/elementwise.h"
#include "runtime/access.h"
#include "runtime/check.h"
#include "runtime/cuda_device.h"
#include "runtime/profile.h"
#include "runtime/status.h"
#include "tools/train/state_hash.h"

namespace tapeline {

double unix_seconds() {
  return std::chrono::duration<double>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

namespace {

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

// What must be finite for a step to count, besides its gradients.
std::vector<Tensor> losses_of(const std::vector<MicroBatchResult>& results) {
  std::vector<Tensor> out;
  const auto add = [&](const std::vector<Tensor>& losses) {
    out.insert(out.end(), losses.begin(), losses.end());
  };
  for (const MicroBatchResult& result : results) {
    out.push_back(result.lm);
    add(result.mtp);
    for (const auto& [layer, of] : result.statistics) {
      add(of.balance_loss);
      add(of.z_loss);
      add(of.indexer_loss);
    }
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
      optimizer_(optimized(model, tensors_), options_.optimizer),
      numbers_(MemoryKind::kPinned, Device::current().dry(),
               cuda_pinned_memory()) {}

StepRecord Trainer::step(bool hash) {
  CHECK_EQ(unfinished(), 0);
  queue(hash);
  return finish();
}

void Trainer::queue(bool hash) {
  const ProfileRange range(Range::kStep);
  ++step_;
  DeviceTimer& timer = timers_[static_cast<size_t>(step_ % 2)];
  timer.start();
  grads_.zero();
  std::vector<HostBatch> batches;
  for (int64_t m = 0; m < options_.micro_batches; ++m) {
    const ProfileRange data(Range::kData);
    batches.push_back(batches_(step_, m));
  }
  const Denominators n = count_targets(batches, model_.mtp_depths());
  auto next = std::make_unique<Running>(numbers_);
  StepRecord& record = next->record;
  record.step = step_;
  const int64_t replays = checkpoint_counters().replays;
  const OffloadCounters moved = offload_counters_;
  std::vector<MicroBatchResult> results;
  for (const HostBatch& batch : batches) results.push_back(run(batch, n));
  record.replays = checkpoint_counters().replays - replays;
  record.offload_bytes = offload_counters_.copied_bytes - moved.copied_bytes;
  record.offload_exposed_ms =
      1000 * (offload_counters_.exposed_seconds - moved.exposed_seconds);
  tokens_ += n.tokens;
  record.tokens = tokens_;
  record.lr = options_.learning_rate.at(step_);
  if (hash) record.grad_hash = gradient_hash(optimizer_, grads_);
  // While the device works on what was queued, the step before ends.
  if (running_) settle();
  send(results, *next);
  Tensor update;
  {
    const ProfileRange range(Range::kOptimizer);
    update = optimizer_.queue(grads_, record.lr, losses_of(results));
  }
  ExpertCounts counts;
  for (const MicroBatchResult& result : results) {
    for (const auto& [layer, of] : result.statistics) {
      std::vector<Tensor>& all = counts[layer];
      all.insert(all.end(), of.expert_counts_E.begin(),
                 of.expert_counts_E.end());
    }
  }
  update_router_biases(counts, update);
  next->update = next->numbers.add(update);
  next->numbers.send();
  timer.stop();
  record.pinned_bytes = Device::current().pinned().stats().reserved;
  if (hash) record.param_hash = parameter_hash(tensors_);
  running_ = std::move(next);
  // Optimizer state and sums are there, so a step has all it ever needs.
  if (++steps_here_ == 2) Device::current().pool().settle();
  if (steps_here_ == options_.offload_warmup_steps) {
    options_.offload.layers = offload_timing_.layers_that_hide();
  }
}

StepRecord Trainer::finish() {
  if (done_.empty()) settle();
  StepRecord record = std::move(done_.front());
  done_.pop_front();
  return record;
}

void Trainer::settle() {
  CHECK(running_ != nullptr) << "no step was queued";
  const std::unique_ptr<Running> step = std::move(running_);
  step->numbers.wait();
  StepRecord record = std::move(step->record);
  record.time_unix = unix_seconds();
  record.step_ms = timers_[static_cast<size_t>(record.step % 2)].milliseconds();
  read_back(*step, record);
  const StepReport report =
      optimizer_.settle(step->numbers.values<double>(step->update));
  record.grad_norm = report.grad_norm;
  record.skipped = optimizer_.skipped();
  last_skipped_ = report.skipped;
  done_.push_back(std::move(record));
}

std::unique_ptr<OffloadGraph> offload_graph(const LanguageModel& model,
                                            const TrainerOptions& options,
                                            int64_t tokens) {
  if (!options.offload.activations && !options.offload.ids) return nullptr;
  return std::make_unique<OffloadGraph>(
      plan_windows(model.layer_calls(tokens), options.offload),
      options.strict_offload);
}

MicroBatchResult run_micro_batch(LanguageModel& model,
                                 const TrainerOptions& options,
                                 const HostBatch& host, const Denominators& n,
                                 OffloadGraph* offload,
                                 ParameterGradients& grads) {
  Context ctx;
  ctx.sequence = Sequence::packed(host.cu_seqlens);
  ctx.recompute = options.recompute;
  ctx.keep = options.keep;
  ctx.drop_norms = options.drop_norms;
  ctx.offload = offload;
  const double share =
      static_cast<double>(host.ids.size()) / static_cast<double>(n.tokens);
  ctx.weights = {
      .balance = options.loss.balance * share,
      .z = options.loss.z * share,
      .indexer = options.loss.indexer / static_cast<double>(n.tokens)};
  model.prepare(ctx);
  const Batch batch = make_batch(host, n, options.loss.mtp_weight, DType::kF32);
  MicroBatchResult out;
  auto [loss, tape] = tapeline::record([&] {
    const ProfileRange forward(Range::kForward);
    return model.loss(batch, ctx);
  });
  out.lm = loss.lm.detach();
  for (const Tensor& mtp : loss.mtp) out.mtp.push_back(mtp.detach());
  {
    const ProfileRange backward(Range::kBackward);
    tape.backward(loss.total, grads);
  }
  out.weights = ctx.weights;
  out.statistics = std::move(ctx.statistics);
  return out;
}

MicroBatchResult Trainer::run(const HostBatch& host, const Denominators& n) {
  const std::unique_ptr<OffloadGraph> offload =
      offload_graph(model_, options_, static_cast<int64_t>(host.ids.size()));
  std::optional<AnomalyScope> anomaly;
  if (options_.anomaly) anomaly.emplace();
  MicroBatchResult result =
      run_micro_batch(model_, options_, host, n, offload.get(), grads_);
  if (offload) finish_offload(*offload);
  if (anomaly && anomaly->first() && !anomaly_) anomaly_ = anomaly->first();
  return result;
}

void Trainer::finish_offload(const OffloadGraph& graph) {
  offload_counters_ += graph.counters();
  if (offload_status_.ok()) offload_status_ = graph.status();
  // The first step here touches memory for the first time.
  if (steps_here_ > 0 && steps_here_ < options_.offload_warmup_steps) {
    offload_timing_.add(graph);
  }
}

void Trainer::send(const std::vector<MicroBatchResult>& results, Running& to) {
  const auto add = [&](const std::vector<Tensor>& tensors) {
    std::vector<size_t> numbers;
    for (const Tensor& t : tensors) numbers.push_back(to.numbers.add(t));
    return numbers;
  };
  for (const MicroBatchResult& result : results) {
    Running::MicroBatch& m = to.micro_batches.emplace_back();
    m.lm = to.numbers.add(result.lm);
    m.mtp = add(result.mtp);
    m.weights = result.weights;
    for (const auto& [layer, of] : result.statistics) {
      m.layers[layer] = {add(of.balance_loss), add(of.z_loss),
                         add(of.indexer_loss), add(of.expert_counts_E)};
    }
  }
}

void Trainer::read_back(const Running& step, StepRecord& record) {
  const Readback& numbers = step.numbers;
  const auto sum_of = [&](const std::vector<size_t>& of) {
    double sum = 0;
    for (size_t i : of) sum += numbers.number(i);
    return sum;
  };
  for (auto& [layer, counts] : expert_counts_) counts.clear();
  for (const Running::MicroBatch& m : step.micro_batches) {
    record.lm_loss += numbers.number(m.lm);
    record.mtp_loss += sum_of(m.mtp);
    for (const auto& [layer, of] : m.layers) {
      record.balance_loss += m.weights.balance * sum_of(of.balance);
      record.z_loss += m.weights.z * sum_of(of.z);
      record.indexer_loss += sum_of(of.indexer);  // weighted per row
      for (size_t i : of.counts) {
        const std::vector<int64_t> counts = numbers.values<int64_t>(i);
        std::vector<int64_t>& sum = expert_counts_[layer];
        sum.resize(counts.size());
        for (size_t e = 0; e < counts.size(); ++e) sum[e] += counts[e];
      }
    }
  }
  record.loss = record.lm_loss + record.mtp_loss + record.balance_loss +
                record.z_loss + record.indexer_loss;
}

void Trainer::update_router_biases(const ExpertCounts& counts,
                                   const Tensor& update) {
  if (options_.loss.router_bias_rate == 0) return;
  const Tensor clip_1 = update.slice(0, 1, 2);
  for (const auto& [layer, all] : counts) {
    Buffer* bias = model_.router_bias(layer);
    if (bias == nullptr || all.empty()) continue;
    const auto rows = static_cast<int64_t>(all.size());
    const Tensor counts_ME = Tensor::empty({rows, all[0].size(0)}, DType::kI64);
    for (int64_t m = 0; m < rows; ++m) {
      copy<int64_t>(
          launch(), read<int64_t>(all[static_cast<size_t>(m)]),
          write<int64_t>(
              counts_ME.slice(0, m, m + 1).view_as({all[0].size(0)})));
    }
    update_router_bias(launch(), read<int64_t>(counts_ME),
                       options_.loss.router_bias_rate,
                       write<float>(bias->value()), read<double>(clip_1));
  }
}

SnapshotContents Trainer::contents(HostTensors& host) const {
  CHECK_EQ(unfinished(), 0);
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
