// A pipeline stage of a language model, as the executor runs it.
//
// A rank has one model object, in which the tensors of its stages have values
// (stage_tensors), a ModelStage per stage, and a step's data. Everything is a
// function of the batches and of global layer numbers, so losses, statistics
// and gradients do not depend on the cut. Values for the log are written by
// micro-batch and global layer and added in that order, as one device does.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "autograd/memory_plan.h"
#include "autograd/mode.h"
#include "autograd/offload.h"
#include "dist/communicator.h"
#include "dist/pipeline/executor.h"
#include "dist/pipeline/layout.h"
#include "dist/pipeline/schedule.h"
#include "models/batch.h"
#include "models/context.h"
#include "models/stage_state.h"
#include "models/weights.h"

namespace tapeline {

// The micro-batches that a pipeline runs in a step, which all its ranks have,
// and what weighs the step's losses: counts of all replicas' micro-batches.
struct StepData {
  std::vector<HostBatch> batches;
  Denominators n;
  double mtp_weight = 0;
  AuxWeights coefficients;  // of the step; each micro-batch gets its share
};

// What a run does with memory. A pass of the schedule that is marked
// recomputed or offloaded is so in all its layers.
struct StageMemory {
  std::vector<bool> recompute;  // by global layer
  std::vector<std::string> keep;
  bool drop_norms = false;
  OffloadChoice offload;
  bool strict_offload = false;
};

// What a step reports, by micro-batch. Every rank fills in what its stages see;
// exchange() adds those of all ranks up. A GPU's numbers are read only then:
// the host queues a step without waiting for it.
class StepLog {
 public:
  // `layers` with prediction layers; experts: 0 if there are none. Of all
  // replicas' micro-batches, of which this rank's begin at `first`.
  StepLog(int micro_batches, int layers, int64_t experts, int first = 0);

  void set_losses(int micro_batch, const Tensor& lm,
                  const std::vector<Tensor>& mtp);
  void add_statistics(int micro_batch, const Context& ctx);
  absl::Status exchange(Communicator& communicator, absl::Duration timeout);

  // Sums over micro-batches in order.
  double lm_loss() const { return sum(0); }
  double mtp_loss() const { return sum(1); }
  double balance_loss() const { return layer_sum(0); }
  double z_loss() const { return layer_sum(1); }
  double indexer_loss() const { return layer_sum(2); }
  double loss() const {
    return lm_loss() + mtp_loss() + balance_loss() + z_loss() + indexer_loss();
  }
  // Of the layer's router; empty if it has none.
  std::vector<int64_t> expert_counts(int layer) const;

 private:
  static constexpr int kKinds = 3;  // of auxiliary losses
  // Numbers on the device whose sum, times the weight, is an entry.
  struct Pending {
    double* entry;
    double weight;
    std::vector<Tensor> numbers;
  };
  struct PendingCounts {
    int layer;
    Tensor counts_E;
  };
  void read();
  void read_what_is_there();
  double sum(int which) const;
  double layer_sum(int kind) const;
  size_t at(int micro_batch, int layer, int kind) const {
    return static_cast<size_t>((micro_batch * layers_ + layer) * kKinds + kind);
  }

  const int micro_batches_, layers_;
  const int64_t experts_;
  const int first_;
  std::vector<double> losses_;  // lm, mtp by micro-batch
  std::vector<double> auxiliary_;
  std::vector<int64_t>
      counts_;  // by layer and expert; then whether there is one
  std::vector<Pending> pending_;
  std::vector<PendingCounts> pending_counts_;
};

// Counters that a stage adds to.
struct StageCounters {
  int64_t forwards = 0;  // of parts
  OffloadCounters moved;
  int64_t planned_bytes = 0;
  absl::Status offload_status;
};

// The tensors of a message at a cut, and back.
std::vector<Tensor> message_of(const StageState& state, const StageCut& cut);
StageState state_of(const std::vector<Tensor>& message, const StageCut& cut);
std::vector<TensorSpec> message_specs(const StageCut& cut, int64_t tokens,
                                      int64_t dim, int64_t selected_keys,
                                      DType dtype);

// What a micro-batch needs between its passes.
struct StageContext {
  Batch batch;
  Context ctx;
  std::unique_ptr<OffloadGraph> offload;
};
// All but the model's rope tables and the offload graph.
std::unique_ptr<StageContext> make_stage_context(const StepData& data,
                                                 const StageMemory& memory,
                                                 const Pass& pass, int layers,
                                                 bool needs_batch);

double scalar_value(const Tensor& x);

// A stage of any model, as a trainer has it.
class LanguageModelStage : public Stage {
 public:
  // Before each step; both outlive it.
  virtual void begin_step(const StepData& data, StepLog& log) = 0;
  virtual const StageCounters& counters() const = 0;

  // Forward alone, to measure the loss of a text: no tape, no prediction
  // depths, no auxiliary losses. The last stage's `loss` is the sum over labels
  // of their cross-entropy.
  virtual std::vector<TensorSpec> evaluation_inputs(int64_t tokens) const = 0;
  virtual StageOutput evaluate(const HostBatch& batch,
                               const std::vector<Tensor>& inputs) = 0;
};

// Lm: MlaLm, GqaLm.
template <class Lm>
class ModelStage : public LanguageModelStage {
 public:
  ModelStage(const Lm& model, const Layout& layout, int stage, DType dtype,
             StageMemory memory)
      : model_(model),
        layout_(layout),
        stage_(stage),
        dtype_(dtype),
        memory_(std::move(memory)) {
    Layout plain = layout;
    for (StageParts& parts : plain) parts.first_depth = parts.depths = 0;
    if (stage > 0) {
      before_ = model.cut_after(layout, stage - 1);
      evaluated_before_ = model.cut_after(plain, stage - 1);
    }
    if (stage + 1 < static_cast<int>(layout.size())) {
      behind_ = model.cut_after(layout, stage);
      evaluated_behind_ = model.cut_after(plain, stage);
    }
  }

  void begin_step(const StepData& data, StepLog& log) override {
    data_ = &data;
    log_ = &log;
  }
  const StageCounters& counters() const override { return counters_; }

  std::vector<TensorSpec> evaluation_inputs(int64_t tokens) const override {
    return message_specs(evaluated_before_, tokens, model_.c->dim,
                         model_.selected_keys(), dtype_);
  }
  StageOutput evaluate(const HostBatch& host,
                       const std::vector<Tensor>& inputs) override {
    const GradModeScope off(GradMode::kOff);
    const StageParts& parts = layout_[stage_];
    Context ctx;
    ctx.sequence = Sequence::packed(host.cu_seqlens);
    ctx.count_experts = false;
    model_.prepare(ctx);
    Batch batch;
    if (parts.embedding || parts.head) {
      batch = make_batch(host, {.tokens = 1, .lm = 1, .mtp = {}}, 0,
                         accumulator_dtype(dtype_));
    }
    const StageResult made =
        model_.run(parts, state_of(inputs, evaluated_before_), batch, ctx);
    StageOutput out{message_of(made.state, evaluated_behind_), {}};
    if (made.loss) out.loss = made.loss->lm;
    return out;
  }

  std::vector<TensorSpec> inputs(int micro_batch) const override {
    return specs(before_, micro_batch);
  }
  std::vector<TensorSpec> outputs(int micro_batch) const override {
    return specs(behind_, micro_batch);
  }

  absl::StatusOr<StageOutput> forward(
      const Pass& pass, const std::vector<Tensor>& inputs) override {
    const StageParts& parts = layout_[stage_];
    const int j = pass.micro_batch;
    const bool needs_batch = parts.embedding || parts.head || parts.depths > 0;
    std::unique_ptr<StageContext>& at = under_way_[j];
    CHECK(at == nullptr) << "[stage] " << to_string(pass) << " again";
    at = make_stage_context(*data_, memory_, pass, model_.total_layers(),
                            needs_batch);
    OffloadChoice offload = memory_.offload;
    if (pass.offload) offload = {.activations = true, .ids = true};
    if ((offload.activations || offload.ids) && parts.layers > 0) {
      at->offload = std::make_unique<OffloadGraph>(
          plan_windows(model_.layer_calls(tokens(j), parts), offload),
          memory_.strict_offload);
      at->ctx.offload = at->offload.get();
    }
    model_.prepare(at->ctx);
    const StageResult made =
        model_.run(parts, state_of(inputs, before_), at->batch, at->ctx);
    ++counters_.forwards;
    StageOutput out{message_of(made.state, behind_), {}};
    if (made.loss) {
      out.loss = made.loss->total;
      log_->set_losses(j, made.loss->lm, made.loss->mtp);
    }
    return out;
  }

  void end(int micro_batch, bool complete) override {
    const auto at = under_way_.find(micro_batch);
    CHECK(at != under_way_.end());
    if (complete) {
      log_->add_statistics(micro_batch, at->second->ctx);
      if (const OffloadGraph* graph = at->second->offload.get()) {
        counters_.moved += graph->counters();
        counters_.planned_bytes += planned_bytes(graph->plan());
        if (counters_.offload_status.ok()) {
          counters_.offload_status = graph->status();
        }
      }
    }
    under_way_.erase(at);
  }

 private:
  int64_t tokens(int micro_batch) const {
    return static_cast<int64_t>(data_->batches[micro_batch].ids.size());
  }
  std::vector<TensorSpec> specs(const StageCut& cut, int micro_batch) const {
    return message_specs(cut, tokens(micro_batch), model_.c->dim,
                         model_.selected_keys(), dtype_);
  }

  const Lm& model_;
  const Layout& layout_;
  const int stage_;
  const DType dtype_;
  const StageMemory memory_;
  StageCut before_, behind_, evaluated_before_, evaluated_behind_;
  const StepData* data_ = nullptr;
  StepLog* log_ = nullptr;
  std::map<int, std::unique_ptr<StageContext>> under_way_;
  StageCounters counters_;
};

// Of all stages of a rank, each tensor once.
template <class Lm>
std::vector<NamedTensor> rank_tensors(Lm& model, const Layout& layout,
                                      const std::vector<int>& placement,
                                      int rank) {
  std::vector<NamedTensor> out;
  std::map<std::string, bool> seen;
  for (size_t s = 0; s < layout.size(); ++s) {
    if (placement[s] != rank) continue;
    for (NamedTensor& t : model.named_tensors(layout, static_cast<int>(s))) {
      if (seen.emplace(t.name, true).second) out.push_back(std::move(t));
    }
  }
  return out;
}

}  // namespace tapeline
