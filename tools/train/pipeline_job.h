// The processes of a pipelined run, as one of them sees them.
//
// Rank 0 is the leader: it has the run's folder, the log and the metrics. All
// ranks take the same decisions from the same numbers; what one alone can find
// out (a signal, a full disk, a locked folder) is told to the others before
// anybody acts on it, so nobody waits for a process that has given up. An error
// of communication carries kExitCommunication; what one rank found carries its
// own code on all.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dist/communicator.h"
#include "dist/launch.h"
#include "dist/snapshot.h"
#include "dist/subgroup.h"
#include "models/weights.h"
#include "tools/data/batches.h"
#include "tools/train/companions.h"
#include "tools/train/evaluate.h"
#include "tools/train/language_model.h"
#include "tools/train/pipeline_plan.h"

namespace tapeline {

class PipelineJob {
 public:
  // `model` has no values yet, and outlives the job. `communicator` is of all
  // processes.
  PipelineJob(PipelinePlan plan, LanguageModel& model,
              std::unique_ptr<Communicator> communicator,
              absl::Duration deadline);

  const PipelinePlan& plan() const { return plan_; }
  absl::Duration deadline() const { return deadline_; }
  int rank() const { return all_->rank(); }
  bool leader() const { return rank() == 0; }
  int stage_rank() const { return place_.pp; }
  int replica() const { return place_.dp; }
  // Of all processes, of this replica's stages, of this stage's replicas.
  Communicator& all() { return *all_; }
  Communicator& pipeline() { return pipeline_; }
  Communicator& replicas() { return replicas_; }

  // Tensors of this rank's stages, each once.
  std::vector<NamedTensor> tensors() const;
  // Whether this rank is the one that writes a tensor.
  bool writes(const std::string& name) const {
    return replica() == 0 && plan_.owner.at(name) == stage_rank();
  }

  // The same with kExitCommunication, which ends the job for all ranks.
  absl::Status lost(absl::Status status);

  // --- Together: every rank calls these, at the same place.
  // OK if it is on all ranks; otherwise on all the error of the first one that
  // has one.
  absl::Status agree(const absl::Status& mine);
  // What the leader has found, or its error.
  absl::StatusOr<std::string> from_leader(
      const absl::StatusOr<std::string>& mine);
  // The same, and the number of a signal that reached some rank, or 0.
  absl::StatusOr<int> agree_on_step(const absl::Status& mine, int signal);

  // The loss of a whole text, each replica a share of it, on all ranks. Every
  // few batches ranks ask each other for a signal that reached one of them,
  // which `signal` gives here; nothing then, and `stopped_by` has the signal.
  absl::StatusOr<Evaluation> evaluate(
      const EvalBatches& batches,
      const std::vector<LanguageModelStage*>& stages, int (*signal)(),
      int* stopped_by);
  // Of all ranks' numbers.
  absl::StatusOr<uint64_t> sum(const std::string& what, uint64_t mine);
  // In name order, each tensor's f32 values hashed at the leader; elsewhere
  // empty. `value` gives a tensor that this rank writes.
  absl::StatusOr<std::string> hash(
      const std::vector<std::string>& sorted_names,
      const std::function<Tensor(const std::string&)>& value);
  // `contents` on each rank what it writes; texts and state are the leader's.
  // Returns the folder on all.
  absl::Status save(const SnapshotStore& store,
                    const SnapshotContents& contents,
                    std::vector<std::string>* warnings);
  // One Hugging Face folder of all ranks' tensors, each of which writes its own
  // shards.
  absl::Status export_model(const std::string& folder, DType dtype,
                            const Companions& companions,
                            uint64_t max_shard_bytes);

 private:
  absl::StatusOr<std::vector<std::string>> tell(const std::string& what,
                                                const std::string& mine);

  const PipelinePlan plan_;
  LanguageModel& model_;
  const absl::Duration deadline_;
  const std::unique_ptr<Communicator> all_;
  const MeshPoint place_;
  Subgroup pipeline_, replicas_;
};

}  // namespace tapeline
