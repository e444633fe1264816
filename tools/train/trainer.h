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
//
// On a GPU the host queues steps and does not wait for them: the next step may
// be queued while one runs, and a step's numbers arrive when it has ended. Only
// its update is queued no sooner than it is known whether the step before was
// taken or skipped, as updates are counted: by then the device has the whole of
// the next step's passes ahead of it.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
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
#include "runtime/device_timer.h"
#include "runtime/pool.h"
#include "tools/train/host_tensors.h"
#include "tools/train/language_model.h"
#include "tools/train/metrics.h"
#include "tools/train/offload_timing.h"
#include "tools/train/readback.h"

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
  // Of a trainer; then only copies that hide are made. 0: all are.
  int64_t offload_warmup_steps = 0;
};

// A step's micro-batch, a pure function of its numbers; steps count from 1.
using BatchFunction =
    std::function<HostBatch(int64_t step, int64_t micro_batch)>;

// What a micro-batch leaves on the device for the step's record.
struct MicroBatchResult {
  Tensor lm;
  std::vector<Tensor> mtp;
  AuxWeights weights;
  std::map<int, LayerStatistics> statistics;  // per global layer
};

// Forward and backward pass of one micro-batch, whose gradients are added to
// `grads`. `n` counts the targets of the whole step. `offload`: null without.
MicroBatchResult run_micro_batch(LanguageModel& model,
                                 const TrainerOptions& options,
                                 const HostBatch& host, const Denominators& n,
                                 OffloadGraph* offload,
                                 ParameterGradients& grads);
// The windows of such a pass; null where options offload nothing.
std::unique_ptr<OffloadGraph> offload_graph(const LanguageModel& model,
                                            const TrainerOptions& options,
                                            int64_t tokens);

// The clock of StepRecord::time_unix.
double unix_seconds();

class Trainer {
 public:
  // The model has values. It outlives the trainer.
  Trainer(LanguageModel& model, TrainerOptions options, BatchFunction batches);
  virtual ~Trainer() = default;

  // Runs the next step to its end. With `hash` the record has the fingerprints
  // of gradients and parameters. Fields of memory and speed are left to the
  // caller; time_unix is when the numbers were seen, step_ms what the device
  // needed.
  StepRecord step(bool hash);
  // The same in two parts: queue() queues the next step, finish() waits for the
  // oldest that has not been finished. With one unfinished step before it,
  // queue() returns when that one's numbers are known.
  virtual void queue(bool hash);
  StepRecord finish();
  int64_t unfinished() const {
    return static_cast<int64_t>(done_.size()) + (running_ ? 1 : 0);
  }
  // What made the last step's numbers not finite, under options.anomaly.
  const std::optional<Anomaly>& anomaly() const { return anomaly_; }
  // Under options.strict_offload: the first difference from the plan.
  const absl::Status& offload_status() const { return offload_status_; }
  const OffloadCounters& offload_counters() const { return offload_counters_; }
  const OffloadChoice& offload_choice() const { return options_.offload; }

  int64_t steps_done() const { return step_; }         // or queued
  bool last_skipped() const { return last_skipped_; }  // the last one finished
  const std::vector<NamedTensor>& tensors() const { return tensors_; }
  const Optimizer& optimizer() const { return optimizer_; }
  ParameterGradients& gradients() { return grads_; }
  // Assignments per expert of the last step known, by layer.
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

  MicroBatchResult run(const HostBatch& host, const Denominators& n);
  void finish_offload(const OffloadGraph& graph);
  // A step that is queued, and where its numbers are in what is read back.
  struct Running {
    explicit Running(Pool& pool) : numbers(pool) {}
    struct MicroBatch {
      size_t lm = 0;
      std::vector<size_t> mtp;
      AuxWeights weights;
      struct Layer {
        std::vector<size_t> balance, z, indexer, counts;
      };
      std::map<int, Layer> layers;
    };
    StepRecord record;
    Readback numbers;
    std::vector<MicroBatch> micro_batches;
    size_t update = 0;  // Optimizer::queue()
  };
  static void send(const std::vector<MicroBatchResult>& results, Running& to);
  void read_back(const Running& step, StepRecord& record);
  void settle();
  // From the counts of each layer, i64 [E] each, unless the update is skipped.
  using ExpertCounts = std::map<int, std::vector<Tensor>>;
  void update_router_biases(const ExpertCounts& counts, const Tensor& update);

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
  std::array<DeviceTimer, 2> timers_;  // of steps with odd and even numbers
  Pool numbers_;  // pinned memory that a step's numbers arrive in
  std::unique_ptr<Running> running_;  // the newest step
  std::deque<StepRecord> done_;       // older ones, not asked for yet
  int64_t step_ = 0, tokens_ = 0;
  int64_t steps_here_ = 0;  // since the trainer was made
  bool last_skipped_ = false;
};

}  // namespace tapeline
