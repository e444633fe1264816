#include "tools/train/pipeline_trainer.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "autograd/checkpoint.h"
#include "dist/all_gather.h"
#include "dist/pipeline/simulator.h"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/profile.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

// A rank's numbers of a step, in the vector that all ranks add up: those of
// each rank in its own places, then per stage and kind of pass what replicas
// add together.
enum Number {
  kBusy,
  kSeconds,
  kReplays,
  kOffloaded,
  kExposed,
  kTimesMessages,  // whether it does
  kMessages,
  kPeak,
  kNumbers
};
enum PassNumber { kPasses, kRecomputed, kPassSeconds, kPassNumbers };
constexpr int kKinds = 4;

size_t pass_place(int stage, PassKind kind) {
  return static_cast<size_t>((stage * kKinds + static_cast<int>(kind)) *
                             kPassNumbers);
}

}  // namespace

PipelineTrainer::PipelineTrainer(LanguageModel& model, TrainerOptions options,
                                 BatchFunction batches, PipelineJob& job,
                                 DType dtype)
    : Trainer(model, std::move(options), std::move(batches), job.tensors()),
      job_(job) {
  const PipelinePlan& plan = job.plan();
  const StageMemory memory = {.recompute = options_.recompute,
                              .keep = options_.keep,
                              .drop_norms = options_.drop_norms,
                              .offload = options_.offload,
                              .strict_offload = options_.strict_offload};
  std::set<const void*> shared;
  if (plan.shared.stages.size() > 1 && model.embedding().defined()) {
    shared_.push_back(model.embedding());
    shared.insert(model.embedding().key());
  }
  by_stage_.resize(static_cast<size_t>(plan.stages()), nullptr);
  own_.resize(by_stage_.size());
  std::map<int, Stage*> by_number;
  for (int s = 0; s < plan.stages(); ++s) {
    if (plan.schedule.placement[s] != job.stage_rank()) continue;
    stages_.push_back(model.make_stage(plan.layout, s, dtype, memory));
    by_stage_[s] = stages_.back().get();
    by_number[s] = stages_.back().get();
    std::set<const void*> seen = shared;
    for (const NamedTensor& t : model.stage_tensors(plan.layout, s)) {
      if (t.parameter == nullptr || !t.parameter->trainable()) continue;
      if (seen.insert(t.parameter->key()).second) {
        own_[s].push_back(*t.parameter);
      }
    }
  }
  for (const NamedTensor& t : sorted_by_name(model.named_tensors())) {
    all_names_.push_back(t.name);
    if (t.parameter != nullptr) names_.push_back(t.name);
  }
  for (size_t i = 0; i < tensors_.size(); ++i) by_name_[tensors_[i].name] = i;
  for (size_t i = 0; i < optimizer_.tensors().size(); ++i) {
    optimized_[optimizer_.tensors()[i].name] = i;
  }
  optimizer_.set_sum_of_squares([this](const std::vector<double>& squares) {
    return whole_sum(squares);
  });
  reducer_ = std::make_unique<GradientReducer>(job.replicas(), job.deadline());
  ExecutorOptions executor;
  executor.deadline = job.deadline();
  executor.warn_after = std::min(executor.warn_after, job.deadline() / 2);
  if (!plan.schedule.groups.empty()) {
    executor.replicas = {{model.embedding(), plan.shared.sites}};
  }
  executor.reduce = [this](int stage) { return reduce(stage); };
  executor_ =
      std::make_unique<Executor>(plan.schedule, plan.programs, job.pipeline(),
                                 std::move(by_number), std::move(executor));
}

// Ranks agree on each step's numbers before the next: nothing is left running.
void PipelineTrainer::queue(bool hash) {
  const ProfileRange range(Range::kStep);
  StepRecord record;
  record.step = step_ + 1;
  timers_[0].start();
  if (status_.ok()) {
    status_ = job_.lost(run(hash, record));
  }
  timers_[0].stop();
  record.step_ms = timers_[0].milliseconds();
  record.time_unix = unix_seconds();
  done_.push_back(std::move(record));
}

absl::Status PipelineTrainer::run(bool hash, StepRecord& record) {
  const PipelinePlan& plan = job_.plan();
  ++step_;
  grads_.zero();
  expert_counts_.clear();
  std::vector<HostBatch> batches;
  for (int64_t m = 0; m < options_.micro_batches; ++m) {
    const ProfileRange data(Range::kData);
    batches.push_back(batches_(step_, m));
  }
  const Denominators n = count_targets(batches, model_.mtp_depths());
  const int here = plan.schedule.micro_batches, first = job_.replica() * here;
  StepLog log(static_cast<int>(options_.micro_batches), model_.layers(),
              model_.experts(), first);
  const StepData data = {
      {batches.begin() + first, batches.begin() + first + here},
      n,
      options_.loss.mtp_weight,
      {options_.loss.balance, options_.loss.z, options_.loss.indexer}};
  for (const auto& stage : stages_) stage->begin_step(data, log);
  const int64_t replays = checkpoint_counters().replays;
  const OffloadCounters moved = offload_counters_;
  {
    std::optional<AnomalyScope> anomaly;
    if (options_.anomaly) anomaly.emplace();
    RETURN_IF_ERROR(executor_->step(grads_));
    RETURN_IF_ERROR(reduce_rest());
    if (anomaly && anomaly->first() && !anomaly_) anomaly_ = anomaly->first();
  }
  RETURN_IF_ERROR(log.exchange(job_.all(), job_.deadline()));
  record.lm_loss = log.lm_loss();
  record.mtp_loss = log.mtp_loss();
  record.balance_loss = log.balance_loss();
  record.z_loss = log.z_loss();
  record.indexer_loss = log.indexer_loss();
  record.loss = log.loss();
  ExpertCounts counts;
  for (int layer = 0; layer < model_.layers(); ++layer) {
    const Buffer* bias = model_.router_bias(layer);
    if (bias == nullptr || !bias->defined()) continue;
    expert_counts_[layer] = log.expert_counts(layer);
    counts[layer].push_back(Tensor::from<int64_t>(
        expert_counts_[layer],
        {static_cast<int64_t>(expert_counts_[layer].size())}));
  }
  tokens_ += n.tokens;
  record.tokens = tokens_;
  record.lr = options_.learning_rate.at(step_);
  if (hash) {
    ASSIGN_OR_RETURN(record.grad_hash, hash_of(/*gradients=*/true));
  }
  const std::vector<Tensor> loss = {
      Tensor::full({1}, DType::kF64, record.loss)};
  Tensor update;
  {
    const ProfileRange range(Range::kOptimizer);
    update = optimizer_.queue(grads_, record.lr, loss);
  }
  RETURN_IF_ERROR(status_);
  const StepReport report = optimizer_.settle(update.to_vector<double>());
  record.grad_norm = report.grad_norm;
  record.skipped = optimizer_.skipped();
  last_skipped_ = report.skipped;
  update_router_biases(counts, update);
  if (hash) {
    ASSIGN_OR_RETURN(record.param_hash, hash_of(/*gradients=*/false));
  }
  RETURN_IF_ERROR(add_statistics(record, replays, moved));
  if (++steps_here_ == 2) Device::current().pool().settle();
  return absl::OkStatus();
}

// As the optimizer takes them: zeros where no backward came by.
std::vector<Tensor> PipelineTrainer::sums_of(
    const std::vector<Parameter>& parameters) {
  std::vector<Tensor> out;
  for (const Parameter& p : parameters) {
    Tensor sum = grads_.combined(p);
    out.push_back(sum ? sum : grads_.accumulator(p, 0));
  }
  return out;
}

absl::Status PipelineTrainer::reduce(int stage) {
  if (job_.replicas().size() == 1) return absl::OkStatus();
  RETURN_IF_ERROR(reducer_->progress());
  return reducer_->begin(stage, sums_of(own_[stage]));
}

// What stages share is complete when the ranks have exchanged it.
absl::Status PipelineTrainer::reduce_rest() {
  if (job_.replicas().size() == 1) return absl::OkStatus();
  std::vector<Parameter> shared;
  for (const Parameter& p : shared_) {
    if (p.trainable()) shared.push_back(p);
  }
  RETURN_IF_ERROR(reducer_->begin(job_.plan().stages(), sums_of(shared)));
  return reducer_->finish();
}

// The square of each tensor from the one rank that counts it, added in the
// order of names.
double PipelineTrainer::whole_sum(const std::vector<double>& squares) {
  std::vector<double> all(names_.size(), 0);
  const std::vector<OptimizedTensor>& mine = optimizer_.tensors();
  for (size_t i = 0; i < mine.size(); ++i) {
    if (job_.plan().owner.at(mine[i].name) != job_.stage_rank()) continue;
    const auto at =
        std::lower_bound(names_.begin(), names_.end(), mine[i].name);
    all[static_cast<size_t>(at - names_.begin())] = squares[i];
  }
  status_ = all_reduce(job_.pipeline(), "gradient norm", all, job_.deadline());
  if (!status_.ok()) return std::numeric_limits<double>::quiet_NaN();
  double sum = 0;
  for (const double square : all) sum += square;
  return sum;
}

absl::StatusOr<std::string> PipelineTrainer::hash_of(bool gradients) {
  if (!gradients) {
    return job_.hash(all_names_, [&](const std::string& name) {
      return tensors_[by_name_.at(name)].value();
    });
  }
  // Which tensors are trained is a matter of values, so each rank says it.
  std::string mine;
  for (const OptimizedTensor& t : optimizer_.tensors()) {
    if (job_.writes(t.name)) absl::StrAppend(&mine, t.name, "\n");
  }
  ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      all_gather(job_.all(), "trained tensors", mine, job_.deadline()));
  std::vector<std::string> names;
  for (const std::string& text : all) {
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = text.find('\n', begin);
      names.push_back(text.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  std::sort(names.begin(), names.end());
  return job_.hash(names, [&](const std::string& name) {
    return optimizer_.gradient(grads_,
                               optimizer_.tensors()[optimized_.at(name)]);
  });
}

absl::Status PipelineTrainer::add_statistics(StepRecord& record,
                                             int64_t replays,
                                             const OffloadCounters& before) {
  offload_counters_ = {};
  for (const auto& stage : stages_) {
    offload_counters_ += stage->counters().moved;
    if (offload_status_.ok()) {
      offload_status_ = stage->counters().offload_status;
    }
  }
  const int ranks = job_.all().size(), stages = job_.plan().stages();
  const ExecutorCounters& counters = executor_->times();
  std::vector<double> numbers(
      static_cast<size_t>(ranks * kNumbers) + pass_place(stages, {}), 0);
  double* mine = numbers.data() + job_.rank() * kNumbers;
  double* passes = numbers.data() + ranks * kNumbers;
  for (const auto& [key, time] : counters.passes) {
    const size_t at = pass_place(key.first, key.second);
    passes[at + kPasses] = static_cast<double>(time.passes);
    passes[at + kRecomputed] = static_cast<double>(time.recomputed);
    passes[at + kPassSeconds] = time.seconds;
    mine[kBusy] += time.seconds;
  }
  mine[kSeconds] = counters.seconds;
  mine[kReplays] = static_cast<double>(checkpoint_counters().replays - replays);
  mine[kOffloaded] =
      static_cast<double>(offload_counters_.copied_bytes - before.copied_bytes);
  mine[kExposed] = offload_counters_.exposed_seconds - before.exposed_seconds;
  mine[kTimesMessages] = counters.exposed_seconds ? 1 : 0;
  mine[kMessages] = counters.exposed_seconds.value_or(0);
  mine[kPeak] = static_cast<double>(Device::current().pool().stats().peak);
  RETURN_IF_ERROR(
      all_reduce(job_.all(), "statistics", numbers, job_.deadline()));
  double busy = 0, longest = 0, replayed = 0, offloaded = 0, exposed = 0;
  double waited = 0;
  bool timed = false;
  for (int r = 0; r < ranks; ++r) {
    const double* of = numbers.data() + r * kNumbers;
    busy += of[kBusy];
    longest = std::max(longest, of[kSeconds]);
    replayed += of[kReplays];
    offloaded += of[kOffloaded];
    exposed = std::max(exposed, of[kExposed]);
    timed = timed || of[kTimesMessages] > 0;
    waited += of[kMessages];
    record.rank_peak_bytes.push_back(static_cast<int64_t>(of[kPeak]));
  }
  record.replays = static_cast<int64_t>(replayed);
  record.offload_bytes = static_cast<int64_t>(offloaded);
  record.offload_exposed_ms = 1000 * exposed;
  record.pinned_bytes = Device::current().pinned().stats().reserved;
  record.bubble_measured = longest > 0 ? 1 - busy / (longest * ranks) : 0;
  record.pipeline_ms = 1000 * longest;
  if (timed) record.messages_exposed_ms = 1000 * waited / ranks;
  record.bubble_simulated = simulated_bubble(
      {numbers.begin() + static_cast<int64_t>(ranks) * kNumbers,
       numbers.end()});
  return absl::OkStatus();
}

// Of the schedule with each stage's average passes of this step, and messages
// that take no time.
double PipelineTrainer::simulated_bubble(
    const std::vector<double>& passes) const {
  Costs costs;
  costs.ov_release = OvRelease::kEarly;  // as the executor runs it
  costs.stages.clear();
  for (int s = 0; s < job_.plan().stages(); ++s) {
    const auto number = [&](PassKind kind, PassNumber which) {
      return passes[pass_place(s, kind) + which];
    };
    const auto mean = [&](PassKind kind) {
      const double n = number(kind, kPasses);
      return n > 0 ? number(kind, kPassSeconds) / n : 0;
    };
    // The simulator adds the forward pass that I and B repeat.
    const double forwards = number(PassKind::kForward, kPasses);
    const double repeated =
        forwards > 0 ? mean(PassKind::kForward) *
                           number(PassKind::kForward, kRecomputed) / forwards
                     : 0;
    costs.stages.push_back(
        {.forward = mean(PassKind::kForward),
         .input = std::max(0.0, mean(PassKind::kInput) - repeated),
         .weight = mean(PassKind::kWeight),
         .backward = std::max(0.0, mean(PassKind::kBackward) - repeated)});
  }
  const absl::StatusOr<Simulation> simulation =
      simulate(job_.plan().schedule, costs);
  CHECK(simulation.ok()) << simulation.status().message();
  return simulation->makespan > 0 ? simulation->bubble : 0;
}

SnapshotContents PipelineTrainer::contents(HostTensors& host) const {
  SnapshotContents contents = Trainer::contents(host);
  std::erase_if(contents.tensors, [&](const NamedBytes& t) {
    std::string_view name = t.name;
    if (const std::string_view prefix = "optimizer.";
        name.starts_with(prefix)) {
      name.remove_prefix(prefix.size());
      name.remove_prefix(name.find('.') + 1);
    }
    return !job_.writes(std::string(name));
  });
  const PipelinePlan& plan = job_.plan();
  contents.layout["ranks"] = job_.all().size();
  contents.layout["pipeline_ranks"] = plan.mesh.pp;
  contents.layout["replicas"] = plan.mesh.dp;
  contents.layout["stages"] = layout_text(plan.layout);
  return contents;
}

}  // namespace tapeline
