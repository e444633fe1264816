// The parts of a run, for run.cc, run_pipeline.cc and run_setup.cc.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dist/compare_settings.h"
#include "dist/launch.h"
#include "dist/snapshot.h"
#include "runtime/cuda_monitor.h"
#include "runtime/file.h"
#include "runtime/status.h"
#include "tools/data/batches.h"
#include "tools/data/corpus.h"
#include "tools/train/companions.h"
#include "tools/train/evaluate.h"
#include "tools/train/exit_code.h"
#include "tools/train/language_model.h"
#include "tools/train/memory_log.h"
#include "tools/train/metrics.h"
#include "tools/train/pipeline_job.h"
#include "tools/train/pipeline_trainer.h"
#include "tools/train/run.h"
#include "tools/train/run_folder.h"
#include "tools/train/run_options.h"
#include "tools/train/stop_signal.h"
#include "tools/train/trainer.h"

namespace tapeline {

class Run {
 public:
  explicit Run(const RunRequest& request)
      : request_(request), c_(request.config) {}

  absl::Status go() {
    RETURN_IF_ERROR(check_settings(c_));
    RETURN_IF_ERROR(ending(kExitBadInput, set_up_device()));
    RETURN_IF_ERROR(load_data());
    RETURN_IF_ERROR(make_model());
    RETURN_IF_ERROR(join_job());
    if (request_.resume) RETURN_IF_ERROR(find_snapshot());
    RETURN_IF_ERROR(make_trainer());
    RETURN_IF_ERROR(open_folder());
    RETURN_IF_ERROR(loop());
    RETURN_IF_ERROR(check_weights());
    RETURN_IF_ERROR(finish());
    return agree(ending(kExitDisk, write_profile()));
  }

 private:
  std::string user_path(const std::string& path) const {
    return request_.base.empty() ? path : join_path(request_.base, path);
  }
  DType dtype() const { return compute_dtype(c_); }
  std::string snapshots() const { return join_path(path_, "snapshots"); }
  bool due_at(int64_t step, int64_t every) const {
    return step == c_.train.steps || (every > 0 && step % every == 0);
  }
  bool due(int64_t every) const {
    return due_at(trainer_->steps_done(), every);
  }

  absl::Status set_up_device();
  absl::StatusOr<Corpus> corpus(const std::string& spec);
  absl::Status load_data();
  absl::Status make_model();
  // run_pipeline.cc
  absl::Status join_job();
  std::vector<Setting> settings(const PipelinePlan& plan) const;
  bool leader() const { return !job_ || job_->leader(); }
  // What this process found, or what another one did.
  absl::Status agree(absl::Status status) const {
    return job_ ? job_->agree(status) : status;
  }
  // A signal that reached this process, or with several, one of them when the
  // step ended.
  int stopped_by() const { return job_ ? signal_ : stop_signal(); }
  absl::Status find_snapshot();
  absl::Status choose();
  absl::Status make_trainer();
  absl::Status make_tensors();
  absl::Status open_folder();
  absl::Status make_folder(uint64_t snapshot);
  absl::StatusOr<Evaluation> measure();
  absl::Status loop();
  absl::Status one_step();
  absl::Status report_steps(int64_t unfinished);
  absl::Status report_step(StepRecord record);
  absl::Status end_memory_log();
  absl::Status watch_cuda(int64_t next);
  absl::Status end_watching(int64_t step);
  void say_what_had_no_effect();
  absl::Status check_finite(const StepRecord& record);
  absl::Status check_weights();
  absl::Status check_own_weights();
  absl::Status report();
  absl::Status sample(const std::string& file);
  absl::Status save();
  absl::Status stop();
  absl::Status finish();
  absl::Status write_profile();

  const RunRequest& request_;
  const Config& c_;
  Launched launch_;
  // Before everything that lives on it. Null: the current one, a CPU.
  std::unique_ptr<Device> device_;
  std::optional<DeviceScope> scope_;
  std::string path_;  // of the run's folder
  Json model_config_;
  Corpus train_, val_;
  std::optional<TrainBatches> batches_;
  std::optional<EvalBatches> eval_;
  std::unique_ptr<LanguageModel> model_;
  Companions companions_;             // of the folder the weights came from
  std::unique_ptr<PipelineJob> job_;  // null: one process and the plain loop
  std::unique_ptr<Trainer> trainer_;
  PipelineTrainer* pipeline_ = nullptr;  // trainer_, with a job
  int signal_ = 0;                       // as stopped_by()
  absl::Status found_;  // in the step, with a job, and not told yet
  std::optional<MemoryLog> memory_;  // of the first steps
  std::optional<Snapshot> snapshot_;
  MetricsCut metrics_;              // what stays of an earlier process's
  std::vector<std::string> notes_;  // to say once there is a log
  std::optional<RunFolder> folder_;
  std::deque<int64_t> peaks_;  // of steps that are not reported yet
  bool evaluated_ = false;     // the step just done
  int64_t saved_ = -1;         // step of the last snapshot of this process
  int64_t steps_logged_ = 0;
  std::unique_ptr<CudaMonitor> monitor_;
  int64_t watched_from_ = 0;  // the step
  bool said_ = false;
  double step_seconds_ = 0;  // of a step, averaged
};

}  // namespace tapeline
