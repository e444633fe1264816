#include "tests/pipeline/pipeline_run.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "autograd/adamw.h"
#include "autograd/offload_test_ops.h"
#include "dist/pipeline/lowering.h"
#include "kernels/aux_loss/aux_loss.h"
#include "kernels/grad_norm/grad_norm.h"
#include "models/deepseek_v3.h"
#include "models/glm_moe_dsa.h"
#include "models/gqa_lm.h"
#include "models/mla_lm.h"
#include "models/qwen3.h"
#include "models/qwen3_moe.h"
#include "runtime/access.h"
#include "runtime/check.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

constexpr uint64_t kSeed = 3;
constexpr double kStd = 0.2, kRate = 0.01;
constexpr absl::Duration kTimeout = absl::Minutes(2);
constexpr double kClipEps = 1e-6;  // as the optimizer's

template <class T>
T must(absl::StatusOr<T> value) {
  CHECK(value.ok()) << value.status().message();
  return *std::move(value);
}

// AdamW over a rank's own tensors, clipped by the norm over all ranks'.
class RankOptimizer {
 public:
  RankOptimizer(std::vector<NamedTensor> tensors,
                const std::vector<std::string>& all,
                const std::map<std::string, int>& owner, int rank)
      : all_(all), owner_(owner), rank_(rank) {
    for (NamedTensor& t : sorted_by_name(std::move(tensors))) {
      if (t.parameter == nullptr || !t.parameter->trainable()) continue;
      tensors_.push_back({t, Tensor::zeros(t.shape, DType::kF32),
                          Tensor::zeros(t.shape, DType::kF32)});
    }
  }

  Tensor gradient(ParameterGradients& grads, const NamedTensor& t) const {
    Tensor sum = grads.combined(*t.parameter);
    if (!sum) sum = grads.accumulator(*t.parameter, 0);
    return t.block(sum);
  }

  double step(Communicator& communicator, ParameterGradients& grads) {
    const OptimizerOptions options;
    std::vector<double> squares(all_.size(), 0);
    for (const Slot& s : tensors_) {
      if (owner_.at(s.tensor.name) != rank_) continue;
      const auto at = std::lower_bound(all_.begin(), all_.end(), s.tensor.name);
      squares[at - all_.begin()] = squared_norm<float>(
          launch(), read<float>(gradient(grads, s.tensor)).view());
    }
    const Tensor shared =
        Tensor::from(squares, {static_cast<int64_t>(squares.size())});
    Collective every{"norm", {}};
    for (int r = 0; r < communicator.size(); ++r) every.ranks.push_back(r);
    CHECK_OK(communicator.all_reduce(every, shared, kTimeout));
    double sum = 0;
    for (const double square : shared.to_vector<double>()) sum += square;
    const double norm = std::sqrt(sum);
    const double clip = std::min(1.0, options.max_norm / (norm + kClipEps));
    ++updates_;
    for (const Slot& s : tensors_) {
      adamw_update(options.adamw,
                   {kRate, clip, updates_, s.tensor.shape.rank() >= 2},
                   s.tensor.value(), gradient(grads, s.tensor), s.m, s.v);
    }
    return norm;
  }

 private:
  struct Slot {
    NamedTensor tensor;
    Tensor m, v;
  };
  const std::vector<std::string>& all_;
  const std::map<std::string, int>& owner_;
  const int rank_;
  std::vector<Slot> tensors_;
  int64_t updates_ = 0;
};

Buffer* router_bias(MlaLm& model, int layer) {
  const auto layers = static_cast<int>(model.c->layers);
  auto& moe = layer < layers ? model.layers.items[layer].moe
                             : model.mtp[layer - layers].block.moe;
  return moe && moe->router.bias && moe->router.bias->defined()
             ? &*moe->router.bias
             : nullptr;
}
Buffer* router_bias(GqaLm&, int) { return nullptr; }
void apply_choices(MlaLm& model) { model.apply_training_choices(); }
void apply_choices(GqaLm&) {}
int64_t experts_of(const MlaLmConfig& c) { return c.experts; }
int64_t experts_of(const GqaLmConfig& c) { return c.moe.experts; }

template <class Lm, class Config>
PipelineResult run_ranks(const std::shared_ptr<const Config>& config,
                         const Layout& layout, const Schedule& given,
                         const Batches& steps, const LossOptions& losses,
                         int mtp_depths, const StageMemory& memory,
                         const ThreadOptions& threads, Communicator* process) {
  const int ranks = static_cast<int>(given.ranks.size());
  CHECK_EQ(layout.size(), given.placement.size());
  Schedule schedule = given;
  // Nothing of this model ever has a value: it knows names and shapes.
  Lm specs{config};
  const SharedWeights shared = specs.shared_embedding(layout);
  if (shared.stages.size() > 1) {
    schedule.groups.push_back({"embedding", shared.stages});
  }
  PipelineResult out;
  std::map<std::string, int> owner;
  std::vector<std::string> all;
  for (int s = 0; s < schedule.stages(); ++s) {
    for (const NamedTensor& t : specs.named_tensors(layout, s)) {
      owner.emplace(t.name, schedule.placement[s]);
    }
  }
  for (const NamedTensor& t : specs.named_tensors()) {
    CHECK(owner.count(t.name) > 0) << t.name << " is no stage's";
  }
  for (const auto& [name, rank] : owner) all.push_back(name);

  const std::vector<RankProgram> programs = must(lower(schedule));
  ThreadGroup group(process == nullptr ? ranks : 0, threads);
  out.status.resize(ranks);
  out.counters.resize(ranks);
  out.steps.resize(steps.size());
  std::mutex mutex;
  const auto run_rank = [&](int rank) {
    test_ops::CopyDevice device;
    Communicator& communicator =
        process == nullptr ? group.rank(rank) : *process;
    Lm model{config};
    const std::vector<NamedTensor> tensors =
        rank_tensors(model, layout, schedule.placement, rank);
    initialize(tensors, DType::kF32, kSeed, kStd);
    apply_choices(model);
    std::vector<std::unique_ptr<ModelStage<Lm>>> stages;
    std::map<int, Stage*> by_number;
    for (int s = 0; s < schedule.stages(); ++s) {
      if (schedule.placement[s] != rank) continue;
      stages.push_back(std::make_unique<ModelStage<Lm>>(model, layout, s,
                                                        DType::kF32, memory));
      by_number[s] = stages.back().get();
    }
    ExecutorOptions options;
    if (!schedule.groups.empty()) {
      options.replicas = {{model.embed.weight, shared.sites}};
    }
    options.deadline = kTimeout;
    Executor executor(schedule, programs, communicator, by_number, options);
    RankOptimizer optimizer(tensors, all, owner, rank);
    ParameterGradients grads;
    for (size_t step = 0; step < steps.size(); ++step) {
      grads.zero();
      StepData data{steps[step],
                    count_targets(steps[step], mtp_depths),
                    losses.mtp_weight,
                    {losses.balance, losses.z, losses.indexer}};
      StepLog log(schedule.micro_batches, specs.total_layers(),
                  experts_of(*config));
      for (const auto& stage : stages) stage->begin_step(data, log);
      out.status[rank] = executor.step(grads);
      if (!out.status[rank].ok()) return;
      CHECK_OK(log.exchange(communicator, kTimeout));
      const double norm = optimizer.step(communicator, grads);
      if (rank == 0 || process != nullptr) {
        out.steps[step] = {log.loss(),
                           log.lm_loss(),
                           log.mtp_loss(),
                           log.balance_loss(),
                           log.z_loss(),
                           log.indexer_loss(),
                           norm};
      }
      for (int layer = 0; layer < specs.total_layers(); ++layer) {
        Buffer* bias = router_bias(model, layer);
        const std::vector<int64_t> counts = log.expert_counts(layer);
        if (rank == 0 || process != nullptr) out.expert_counts[layer] = counts;
        if (bias == nullptr || counts.empty()) continue;
        update_router_bias(
            launch(), view_of(counts, {static_cast<int64_t>(counts.size())}),
            losses.router_bias_rate, write<float>(bias->value()));
      }
    }
    const std::lock_guard lock(mutex);
    out.counters[rank] = executor.counters();
    for (const auto& stage : stages) {
      const StageCounters& c = stage->counters();
      out.stages.forwards += c.forwards;
      out.stages.moved += c.moved;
      out.stages.planned_bytes += c.planned_bytes;
      if (out.stages.offload_status.ok()) {
        out.stages.offload_status = c.offload_status;
      }
    }
    const auto put = [&](std::map<std::string, std::vector<float>>& where,
                         const std::string& name, std::vector<float> values) {
      const auto [at, fresh] = where.emplace(name, values);
      CHECK(fresh || at->second == values) << name << " differs by rank";
    };
    for (const NamedTensor& t : tensors) {
      ++out.owners[t.name];
      put(out.tensors, t.name, t.value().to_vector<float>());
      if (t.parameter == nullptr || !t.parameter->trainable()) continue;
      put(out.gradients, t.name,
          optimizer.gradient(grads, t).to_vector<float>());
    }
  };
  if (process != nullptr) {
    run_rank(process->rank());
    return out;
  }
  std::vector<std::thread> all_threads;
  for (int r = 0; r < ranks; ++r) all_threads.emplace_back(run_rank, r);
  for (std::thread& thread : all_threads) thread.join();
  return out;
}

}  // namespace

LossOptions test_losses(bool train_indexer) {
  return {.mtp_weight = 0.3,
          .balance = 0.01,
          .z = 0.001,
          .indexer = train_indexer ? 0.5 : 0,
          .router_bias_rate = 0.01};
}

PipelineResult run_trainer(const PipelineModel& of, const Batches& steps,
                           const LossOptions& losses) {
  test_ops::CopyDevice device;
  const std::unique_ptr<LanguageModel> model =
      must(make_language_model(of.json, of.choices));
  initialize(model->named_tensors(), DType::kF32, kSeed, kStd);
  model->apply_training_choices();
  TrainerOptions options;
  options.micro_batches = static_cast<int64_t>(steps[0].size());
  options.loss = losses;
  options.learning_rate.lr = kRate;
  Trainer trainer(*model, options, [&](int64_t step, int64_t j) {
    return steps[static_cast<size_t>(step - 1)][static_cast<size_t>(j)];
  });
  PipelineResult out;
  for (size_t step = 0; step < steps.size(); ++step) {
    const StepRecord r = trainer.step(/*hash=*/false);
    CHECK(!trainer.last_skipped());
    CHECK_EQ(r.replays, 0);
    out.steps.push_back({r.loss, r.lm_loss, r.mtp_loss, r.balance_loss,
                         r.z_loss, r.indexer_loss, r.grad_norm});
  }
  for (const NamedTensor& t : trainer.tensors()) {
    out.tensors[t.name] = t.value().to_vector<float>();
    if (t.buffer == nullptr) continue;
    for (const float bias : out.tensors[t.name]) {
      if (bias != 0) out.router_biases.insert(t.name);
    }
  }
  out.expert_counts = trainer.expert_counts();
  for (const OptimizedTensor& t : trainer.optimizer().tensors()) {
    out.gradients[t.name] =
        trainer.optimizer().gradient(trainer.gradients(), t).to_vector<float>();
  }
  return out;
}

PipelineResult run_pipeline(const PipelineModel& of, const Layout& layout,
                            const Schedule& schedule, const Batches& steps,
                            const LossOptions& losses,
                            const StageMemory& memory,
                            const ThreadOptions& threads,
                            Communicator* process) {
  const std::string type = of.json.find("model_type")->string();
  if (type == "qwen3_moe" || type == "qwen3") {
    GqaLmConfig c =
        must(type == "qwen3" ? parse_qwen3(of.json) : parse_qwen3_moe(of.json));
    c.moe.balance = of.choices.balance;
    return run_ranks<GqaLm>(std::make_shared<const GqaLmConfig>(c), layout,
                            schedule, steps, losses, 0, memory, threads,
                            process);
  }
  MlaLmConfig c = must(type == "glm_moe_dsa" ? parse_glm_moe_dsa(of.json)
                                             : parse_deepseek_v3(of.json));
  if (of.choices.mtp_depths >= 0) c.mtp_depths = of.choices.mtp_depths;
  c.mtp_after_norm = of.choices.mtp_after_norm;
  c.indexer_training = of.choices.indexer;
  c.absorbed = of.choices.absorbed.value_or(c.absorbed);
  c.balance = of.choices.balance;
  return run_ranks<MlaLm>(std::make_shared<const MlaLmConfig>(c), layout,
                          schedule, steps, losses, c.mtp_depths, memory,
                          threads, process);
}

std::string result_text(const PipelineResult& result) {
  std::string out;
  const auto write = [&](const std::string& name, const auto& values) {
    absl::StrAppend(&out, name);
    for (const double value : values) {
      char text[64];
      std::snprintf(text, sizeof(text), " %a", value);
      out += text;
    }
    out += "\n";
  };
  for (const StepLosses& s : result.steps) {
    write("step", std::vector<double>{s.loss, s.lm, s.mtp, s.balance, s.z,
                                      s.indexer, s.grad_norm});
  }
  for (const auto& [name, values] : result.gradients) {
    write("gradient:" + name, values);
  }
  for (const auto& [name, values] : result.tensors) {
    write("tensor:" + name, values);
  }
  for (const auto& [layer, counts] : result.expert_counts) {
    write(absl::StrCat("experts:", layer), counts);
  }
  return out;
}

void add_result(const std::string& text, PipelineResult& to) {
  std::istringstream lines(text);
  std::vector<StepLosses> steps;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    std::string name;
    fields >> name;
    std::vector<double> values;
    for (std::string value; fields >> value;) {
      values.push_back(std::strtod(value.c_str(), nullptr));
    }
    if (name == "step") {
      steps.push_back({values.at(0), values[1], values[2], values[3], values[4],
                       values[5], values.at(6)});
      continue;
    }
    const size_t colon = name.find(':');
    if (name.substr(0, colon) == "experts") {
      const std::vector<int64_t> counts(values.begin(), values.end());
      const auto [at, fresh] =
          to.expert_counts.emplace(std::atoi(name.c_str() + colon + 1), counts);
      CHECK(at->second == counts) << name << " differs by rank";
      continue;
    }
    auto& where = name.substr(0, colon) == "tensor" ? to.tensors : to.gradients;
    const std::vector<float> floats(values.begin(), values.end());
    const auto [at, fresh] = where.emplace(name.substr(colon + 1), floats);
    CHECK(at->second == floats) << name << " differs by rank";
  }
  CHECK(to.steps.empty() || to.steps == steps) << "losses differ by rank";
  to.steps = steps;
}

std::string difference(const PipelineResult& got, const PipelineResult& want) {
  for (const absl::Status& status : got.status) {
    if (!status.ok()) return std::string(status.message());
  }
  if (got.steps.size() != want.steps.size()) return "steps";
  for (size_t i = 0; i < want.steps.size(); ++i) {
    const StepLosses &a = got.steps[i], &b = want.steps[i];
    if (a == b) continue;
    return absl::StrCat("step ", i, ": loss ", a.loss, " ", b.loss, ", lm ",
                        a.lm, " ", b.lm, ", mtp ", a.mtp, " ", b.mtp,
                        ", balance ", a.balance, " ", b.balance, ", z ", a.z,
                        " ", b.z, ", indexer ", a.indexer, " ", b.indexer,
                        ", norm ", a.grad_norm, " ", b.grad_norm);
  }
  const auto compare = [](const auto& a, const auto& b) -> std::string {
    for (const auto& [name, values] : b) {
      const auto found = a.find(name);
      if (found == a.end()) return name + " is missing";
      if (found->second.size() != values.size()) {
        return absl::StrCat(name, " has ", found->second.size(),
                            " elements, not ", values.size());
      }
      if (std::memcmp(found->second.data(), values.data(),
                      values.size() * sizeof(float)) != 0) {
        return name;
      }
    }
    return a.size() == b.size() ? "" : "more tensors";
  };
  const std::string gradient = compare(got.gradients, want.gradients);
  if (!gradient.empty()) return "gradient of " + gradient;
  const std::string tensor = compare(got.tensors, want.tensors);
  if (!tensor.empty()) return tensor;
  // A layer without experts has no counts or none at all.
  const auto of_layer = [](const PipelineResult& of, int layer) {
    const auto found = of.expert_counts.find(layer);
    return found == of.expert_counts.end() ? std::vector<int64_t>()
                                           : found->second;
  };
  for (const PipelineResult* of : {&got, &want}) {
    for (const auto& [layer, counts] : of->expert_counts) {
      if (of_layer(got, layer) != of_layer(want, layer)) {
        return absl::StrCat("expert counts of layer ", layer);
      }
    }
  }
  return "";
}

}  // namespace tapeline
