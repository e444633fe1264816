// Trainer: the steps of a training run, without files or console.
//
//   for each micro-batch   record model.loss, backward into fp32 sums
//   clip, AdamW or Muon    at the learning rate of the step
//   router biases          from expert counts of all micro-batches
//
// A step is a function of (model, optimizer state, step number): batches come
// from a pure function of the step, so a run that continues from a snapshot
// makes the same bits. Nothing divides by the number of micro-batches: every
// loss has its denominator before the step. Not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "autograd/anomaly.h"
#include "autograd/gradients.h"
#include "autograd/learning_rate.h"
#include "autograd/memory_plan.h"
#include "autograd/offload.h"
#include "autograd/optimizer.h"
#include "dist/snapshot.h"
#include "models/batch.h"
#include "models/context.h"
#include "tools/train/host_tensors.h"
#include "tools/train/language_model.h"
#include "tools/train/metrics.h"
#include "tools/train/offload_timing.h"

namespace tapeline {

// Coefficients of the total; 0 turns a loss off.
struct LossOptions {
  double mtp_weight = 0.1;  // of the mean over depths
  double balance = 0;       // of the sum over layers
  double z = 0;
  double indexer = 0;
  double router_bias_rate = 0;
};

struct TrainerOptions {
  int64_t micro_batches = 1;
  LossOptions loss;
  OptimizerOptions optimizer;
  LearningRate learning_rate;
  bool anomaly = false;           // look for the first value that is not finite
  std::vector<bool> recompute;    // per global layer; empty: none
  std::vector<std::string> keep;  // ops whose outputs recomputed layers keep
  bool drop_norms = false;
  OffloadChoice offload;
  bool strict_offload = false;
  int64_t offload_warmup_steps = 0;  // then only copies that hide; 0: all
};

// A step's micro-batch, a pure function of its numbers; steps count from 1.
using BatchFunction =
    std::function<HostBatch(int64_t step, int64_t micro_batch)>;

class Trainer {
 public:
  // The model has values. It outlives the trainer.
  Trainer(LanguageModel& model, TrainerOptions options, BatchFunction batches);
  virtual ~Trainer() = default;

  // Runs the next step. With `hash` the record has the fingerprints of
  // gradients and parameters. Fields of time and memory are left to the caller.
  virtual StepRecord step(bool hash);
  // What made the last step's numbers not finite, under options.anomaly.
  const std::optional<Anomaly>& anomaly() const { return anomaly_; }
  // Under options.strict_offload: the first difference from the plan.
  const absl::Status& offload_status() const { return offload_status_; }
  const OffloadCounters& offload_counters() const { return offload_counters_; }
  const OffloadChoice& offload_choice() const { return options_.offload; }

  int64_t steps_done() const { return step_; }
  bool last_skipped() const { return last_skipped_; }
  const std::vector<NamedTensor>& tensors() const { return tensors_; }
  const Optimizer& optimizer() const { return optimizer_; }
  ParameterGradients& gradients() { return grads_; }
  // Assignments per expert of the last step, by layer.
  const std::map<int, std::vector<int64_t>>& expert_counts() const {
    return expert_counts_;
  }

  // All that the next step depends on. `host` keeps the bytes.
  virtual SnapshotContents contents(HostTensors& host) const;
  // Restores optimizer state and counters; weights were loaded by load(). Says
  // in `notes` where the learning rates go on differently than was planned.
  absl::Status restore(const Snapshot& snapshot,
                       std::vector<std::string>* notes);

 protected:
  // Of a part of the model: the tensors that have values here.
  Trainer(LanguageModel& model, TrainerOptions options, BatchFunction batches,
          std::vector<NamedTensor> tensors);

  // What a micro-batch leaves on the device for the step's record.
  struct Leftover {
    Tensor lm;
    std::vector<Tensor> mtp;
    AuxWeights weights;
    std::map<int, LayerStatistics> statistics;  // per global layer
  };
  Leftover run_micro_batch(const HostBatch& host, const Denominators& n);
  void finish_offload(const OffloadGraph& graph);
  void read_back(const Leftover& left, StepRecord& record);
  void update_router_biases();

  LanguageModel& model_;
  TrainerOptions options_;
  BatchFunction batches_;
  std::vector<NamedTensor> tensors_;  // by name
  Optimizer optimizer_;
  ParameterGradients grads_;
  std::map<int, std::vector<int64_t>> expert_counts_;
  std::optional<Anomaly> anomaly_;
  OffloadCounters offload_counters_;  // since the trainer was made
  OffloadTiming offload_timing_;
  absl::Status offload_status_;
  int64_t step_ = 0, tokens_ = 0;
  int steps_here_ = 0;  // since the trainer was made, until the pool settles
  bool last_skipped_ = false;
};

}  // namespace tapeline
