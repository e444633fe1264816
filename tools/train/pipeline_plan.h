// How a run is spread over processes: which stages, in which order, by whom.
//
// A pure function of config, model and number of processes, so every process
// finds the same, and the same mistakes, before it connects or loads anything.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dist/mesh.h"
#include "dist/nccl_communicator.h"
#include "dist/pipeline/layout.h"
#include "dist/pipeline/lowering.h"
#include "dist/pipeline/schedule.h"
#include "models/stage_state.h"
#include "tools/config/config.h"
#include "tools/train/language_model.h"

namespace tapeline {

struct PipelinePlan {
  MeshPoint mesh;        // pp pipeline ranks, dp replicas of the pipeline
  std::string name;      // of the schedule: a name or a file
  Layout layout;         // by stage
  Schedule schedule;     // of one replica's micro-batches, with groups
  SharedWeights shared;  // the embedding's uses
  std::vector<RankProgram> programs;
  // Pipeline rank that counts, saves and exports a tensor; all tensors.
  std::map<std::string, int> owner;

  int stages() const { return schedule.stages(); }
};

// What is wrong however many processes there are.
absl::Status check_pipeline_settings(const Config& config);

// Whether the run is one process with the whole model and no stages: the plain
// loop.
bool is_plain(const Config& config, int processes);

// InvalidArgument for what cannot be. `schedule_file` is pipeline.file as this
// process finds it.
absl::StatusOr<PipelinePlan> plan_pipeline(const Config& config,
                                           LanguageModel& model, int processes,
                                           const std::string& schedule_file);

// Behind the channels of stages, groups and reductions: what the leader
// collects.
inline constexpr int kGatherChannel = (1 << 23) + 1;

// Every channel that the run uses, and every set of ranks that sums, in one
// order: for a communicator that makes them all at the start.
std::vector<NcclRoute> routes_of(const PipelinePlan& plan);
std::vector<std::vector<int>> groups_of(const PipelinePlan& plan);

// Which pipeline ranks have which stages, for people: "rank 0: stage 0 Ett;".
std::string plan_text(const PipelinePlan& plan);

}  // namespace tapeline
