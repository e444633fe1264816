// The trainer's steps under a pipeline: each rank runs its stages' passes, and
// its own tensors' part of the update.
//
// Losses, gradients, norm, biases and parameters have the bits of the plain
// loop (trainer.h): every sum is made in its order. With replicas a gradient is
// the sum over replicas, in order, of each one's sum over its micro-batches,
// which is another order than one device's, and the same in every run; replica
// r has the micro-batches [r m/n, (r+1) m/n) of a step. A replica's gradients
// leave as soon as a stage has its last weight gradient.
//
// After an error of communication status() has it and nothing of the step
// counts.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dist/gradient_reducer.h"
#include "dist/pipeline/executor.h"
#include "models/pipeline_stage.h"
#include "tools/train/pipeline_job.h"
#include "tools/train/trainer.h"

namespace tapeline {

class PipelineTrainer : public Trainer {
 public:
  // This rank's tensors have values. Model and job outlive it.
  PipelineTrainer(LanguageModel& model, TrainerOptions options,
                  BatchFunction batches, PipelineJob& job, DType dtype);

  // Hashes are the leader's alone; everything else is the same on all ranks,
  // but for memory.
  void queue(bool hash) override;
  // What this rank writes.
  SnapshotContents contents(HostTensors& host) const override;

  // By stage; null where another rank has it.
  const std::vector<LanguageModelStage*>& stages() const { return by_stage_; }
  const absl::Status& status() const { return status_; }

 private:
  absl::Status run(bool hash, StepRecord& record);
  absl::Status reduce(int stage);
  absl::Status reduce_rest();
  std::vector<Tensor> sums_of(const std::vector<Parameter>& parameters);
  absl::Status add_statistics(StepRecord& record, int64_t replays,
                              const OffloadCounters& before);
  double simulated_bubble(const std::vector<double>& passes) const;
  double whole_sum(const std::vector<double>& squares);
  absl::StatusOr<std::string> hash_of(bool gradients);

  PipelineJob& job_;
  std::vector<std::unique_ptr<LanguageModelStage>> stages_;
  std::vector<LanguageModelStage*> by_stage_;
  // Parameters that a stage alone adds to, and those that several do.
  std::vector<std::vector<Parameter>> own_;
  std::vector<Parameter> shared_;
  std::vector<std::string> names_;           // of all parameters, sorted
  std::vector<std::string> all_names_;       // with buffers
  std::map<std::string, size_t> by_name_;    // in tensors_
  std::map<std::string, size_t> optimized_;  // in optimizer_.tensors()
  std::unique_ptr<GradientReducer> reducer_;
  std::unique_ptr<Executor> executor_;
  absl::Status status_;
};

}  // namespace tapeline
