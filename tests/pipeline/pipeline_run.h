// Steps of a real model under a pipeline of rank threads, and the same steps by
// the trainer's plain loop: record a micro-batch, run it backward, the next.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "dist/communicator.h"
#include "dist/pipeline/executor.h"
#include "dist/pipeline/layout.h"
#include "dist/pipeline/schedule.h"
#include "dist/thread_communicator.h"
#include "models/batch.h"
#include "models/pipeline_stage.h"
#include "runtime/json.h"
#include "tools/train/language_model.h"
#include "tools/train/trainer.h"

namespace tapeline {

struct PipelineModel {
  Json json;  // config.json
  ModelChoices choices;
};

struct StepLosses {
  double loss = 0, lm = 0, mtp = 0, balance = 0, z = 0, indexer = 0;
  double grad_norm = 0;
  friend bool operator==(const StepLosses&, const StepLosses&) = default;
};

struct PipelineResult {
  std::vector<StepLosses> steps;
  std::map<std::string, std::vector<float>> tensors;    // after the last step
  std::map<std::string, std::vector<float>> gradients;  // of the last step
  std::set<std::string> router_biases;                  // names, not all 0
  // Of the pipeline, by rank; counters of the last step.
  std::vector<absl::Status> status;
  std::vector<ExecutorCounters> counters;
  StageCounters stages;               // of all
  std::map<std::string, int> owners;  // by tensor: ranks that hold it
  std::map<int, std::vector<int64_t>> expert_counts;  // by layer
};

using Batches = std::vector<std::vector<HostBatch>>;  // by step

LossOptions test_losses(bool train_indexer);

PipelineResult run_trainer(const PipelineModel& model, const Batches& steps,
                           const LossOptions& losses);
// With `process` the rank of that communicator alone, on this thread.
PipelineResult run_pipeline(const PipelineModel& model, const Layout& layout,
                            const Schedule& schedule, const Batches& steps,
                            const LossOptions& losses,
                            const StageMemory& memory,
                            const ThreadOptions& threads,
                            Communicator* process = nullptr);
// A rank's own losses, gradients and tensors, bit for bit, and back.
std::string result_text(const PipelineResult& result);
void add_result(const std::string& text, PipelineResult& to);

// Empty, or the first thing that is not the same bit for bit.
std::string difference(const PipelineResult& got, const PipelineResult& want);

}  // namespace tapeline
