#include "tools/train/run.h"

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "autograd/checkpoint.h"
#include "runtime/cuda_device.h"
#include "runtime/device.h"
#include "runtime/profile.h"
#include "tools/train/console_text.h"
#include "tools/train/evaluate.h"
#include "tools/train/export.h"
#include "tools/train/generate.h"
#include "tools/train/host_tensors.h"
#include "tools/train/resume.h"
#include "tools/train/run_class.h"
#include "tools/train/stop_signal.h"

namespace tapeline {
absl::Status Run::loop() {
  folder_->say(absl::StrCat(
      "training ", c_.run.name, ": ", parameter_count(model_->named_tensors()),
      " parameters, ", train_.bytes(), " bytes of text, ",
      c_.train.micro_batches * c_.train.seq_len, " tokens a step, ",
      Device::current().threads().threads(), " threads",
      Device::current().kind() == DeviceKind::kCuda
          ? absl::StrCat(", ", cuda_properties()->name)
          : ""));
  if (job_) folder_->say(absl::StrCat("pipeline: ", plan_text(job_->plan())));
  // What an interrupted run still owes for its last step.
  if (snapshot_) {
    RETURN_IF_ERROR(report());
    if (stopped_by() != 0) return stop();
  }
  while (trainer_->steps_done() < c_.train.steps) {
    RETURN_IF_ERROR(one_step());
    if (stopped_by() != 0) return stop();
    // Saved before it is evaluated, which may take long: a run that goes on
    // from here does what is missing.
    if (due(c_.train.snapshot_every)) RETURN_IF_ERROR(save());
    RETURN_IF_ERROR(report());
    if (stopped_by() != 0) return stop();
  }
  return absl::OkStatus();
}

// Queues a step. On a GPU the one before it is reported, while this one runs,
// unless something is to be done after this step or the host looks into it.
absl::Status Run::one_step() {
  Pool& pool = Device::current().pool();
  pool.reset_peak();
  const int64_t next = trainer_->steps_done() + 1;
  if (leader() && steps_logged_ < c_.debug.memory && !memory_) {
    memory_.emplace(Device::current(), /*lines=*/true);
  }
  // What this process alone finds is told to the others with the step's.
  found_ = watch_cuda(next);
  if (!job_) RETURN_IF_ERROR(found_);
  trainer_->queue(c_.debug.hash_every > 0 && next % c_.debug.hash_every == 0);
  if (job_) RETURN_IF_ERROR(pipeline_->status());
  peaks_.push_back(pool.stats().peak);
  evaluated_ = false;
  if (memory_ && ++steps_logged_ == c_.debug.memory) {
    found_.Update(ending(kExitDisk, end_memory_log()));
    if (!job_) RETURN_IF_ERROR(found_);
  }
  const bool wait =
      job_ != nullptr || Device::current().kind() != DeviceKind::kCuda ||
      c_.debug.anomaly || stop_signal() != 0 || due(c_.train.eval_every) ||
      due(c_.train.sample_every) || due(c_.train.snapshot_every);
  RETURN_IF_ERROR(report_steps(wait ? 0 : 1));
  if (c_.debug.cuda_first == 0) return absl::OkStatus();
  return agree(end_watching(next));
}

// From the first step on that is to be watched; steps before it have ended.
absl::Status Run::watch_cuda(int64_t next) {
  if (c_.debug.cuda_first == 0 || next != c_.debug.cuda_first) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(report_steps(0));
  watched_from_ = next;
  ASSIGN_OR_RETURN(monitor_, CudaMonitor::start());
  return absl::OkStatus();
}

absl::Status Run::end_watching(int64_t step) {
  const bool last = step >= c_.debug.cuda_last || step == c_.train.steps;
  if (monitor_ == nullptr || !last) return absl::OkStatus();
  RETURN_IF_ERROR(report_steps(0));
  const CudaReport report = std::exchange(monitor_, nullptr)->stop();
  folder_->say(absl::StrCat(
      "steps ", watched_from_, " to ", step, ": ", report.synchronizations,
      " synchronizations, ", report.allocations, " allocations, ", report.frees,
      " frees, ", report.pageable_copies, " pageable copies"));
  const auto write = [&]() -> absl::Status {
    Json json = to_json(report);
    json["first_step"] = watched_from_;
    json["last_step"] = step;
    RETURN_IF_ERROR(write_json(folder_->file("cuda.json"), json));
    RETURN_IF_ERROR(make_directories(folder_->file("trace")));
    return write_file_atomic(folder_->file("trace/cuda.json"),
                             chrome_trace(report));
  };
  return ending(kExitDisk, write());
}

// Until so many steps are unfinished.
absl::Status Run::report_steps(int64_t unfinished) {
  while (trainer_->unfinished() > unfinished) {
    RETURN_IF_ERROR(report_step(trainer_->finish()));
  }
  return absl::OkStatus();
}

absl::Status Run::report_step(StepRecord record) {
  const double seconds = 1e-3 * record.step_ms;
  record.tokens_per_s =
      static_cast<double>(c_.train.seq_len * c_.train.micro_batches) / seconds;
  record.pool_peak_bytes = peaks_.front();
  peaks_.pop_front();
  record.rss_peak_bytes = peak_resident_bytes();
  step_seconds_ =
      step_seconds_ == 0 ? seconds : 0.95 * step_seconds_ + 0.05 * seconds;
  const auto log = [&]() -> absl::Status {
    RETURN_IF_ERROR(
        ending(kExitDisk, folder_->append_metrics(to_json(record))));
    say_what_had_no_effect();
    const int64_t left = c_.train.steps - record.step;
    if (record.step == 1 || due_at(record.step, c_.train.log_every)) {
      folder_->say(step_line(record, c_.train.steps,
                             static_cast<double>(left) * step_seconds_));
    }
    return check_finite(record);
  };
  if (!job_) return log();
  absl::Status mine = found_;
  mine.Update(log());
  ASSIGN_OR_RETURN(signal_, job_->agree_on_step(mine, stop_signal()));
  return absl::OkStatus();
}

// Once, after the first step: settings that did not do what they say.
void Run::say_what_had_no_effect() {
  if (std::exchange(said_, true)) return;
  const OffloadCounters& moved = trainer_->offload_counters();
  if (moved.refused_bytes > 0) {
    folder_->say(absl::StrCat(
        "offload: ", moved.refused_bytes,
        " bytes of a step stay on the device, the pinned memory is at its cap; "
        "raise offload.pinned_cap_mib"));
  }
  const OffloadChoice& offload = trainer_->offload_choice();
  if ((offload.activations || offload.ids) && moved.copies == 0 &&
      moved.refused_bytes == 0) {
    folder_->say(
        "offload: no layer has anything to offload, nothing was moved");
  }
  if (c_.recompute.policy == "keep" && checkpoint_counters().kept_ops == 0) {
    folder_->say(absl::StrCat("recompute.keep: no layer runs ",
                              absl::StrJoin(c_.recompute.keep, " or "),
                              ", nothing is kept"));
  }
}

absl::Status Run::end_memory_log() {
  if (!memory_) return absl::OkStatus();
  RETURN_IF_ERROR(
      write_file_atomic(folder_->file("memory.jsonl"), memory_->take_lines()));
  RETURN_IF_ERROR(make_directories(folder_->file("trace")));
  const std::string trace = memory_->chrome_trace();
  memory_.reset();
  return write_file_atomic(folder_->file("trace/memory.json"), trace);
}

absl::Status Run::check_finite(const StepRecord& record) {
  if (trainer_->anomaly()) {
    return ending(kExitNotFinite, absl::OutOfRangeError(absl::StrCat(
                                      "step ", record.step, ": ",
                                      to_string(*trainer_->anomaly()))));
  }
  RETURN_IF_ERROR(ending(kExitOutOfMemory, trainer_->offload_status()));
  if (!trainer_->last_skipped()) return absl::OkStatus();
  folder_->say(absl::StrCat("step ", record.step,
                            " skipped: loss or gradient is not finite"));
  if (record.skipped <= c_.train.max_skipped) return absl::OkStatus();
  return ending(kExitNotFinite,
                absl::OutOfRangeError(absl::StrCat(
                    "step ", record.step, ": ", record.skipped,
                    " steps were not finite, more than train.max_skipped = ",
                    c_.train.max_skipped,
                    "; lower optimizer.lr, or find the operation with --set "
                    "debug.anomaly=true")));
}

// Evaluation and sample of the step just done, where they are due and missing.
absl::Status Run::report() {
  const int64_t step = trainer_->steps_done();
  if (eval_ && due(c_.train.eval_every) && !evaluated_) {
    const ProfileRange range(Range::kEval);
    ASSIGN_OR_RETURN(const Evaluation e, measure());
    if (stopped_by() != 0) return absl::OkStatus();
    evaluated_ = true;
    const EvalRecord record{step, e.loss, e.bits_per_byte, e.bytes};
    RETURN_IF_ERROR(
        agree(ending(kExitDisk, folder_->append_metrics(to_json(record)))));
    char line[128];
    std::snprintf(line, sizeof(line),
                  "step %lld | val loss %.4f | %.4f bits per byte | %lld bytes",
                  static_cast<long long>(step), e.loss, e.bits_per_byte,
                  static_cast<long long>(e.bytes));
    folder_->say(line);
    if (!std::isfinite(e.loss)) {
      return ending(kExitNotFinite,
                    absl::OutOfRangeError(absl::StrCat(
                        "step ", step,
                        ": the validation loss is not finite; go on with "
                        "--resume=PATH of a snapshot before this step and a "
                        "lower optimizer.lr")));
    }
  }
  // Text is not yet made by stages.
  if (job_) return absl::OkStatus();
  const std::string file =
      folder_->file(absl::StrCat("samples/", snapshot_name(step), ".txt"));
  if (due(c_.train.sample_every) && !path_exists(file)) return sample(file);
  return absl::OkStatus();
}

absl::Status Run::sample(const std::string& file) {
  const ProfileRange range(Range::kSample);
  std::string text;
  for (const double temperature : {0.0, c_.sample.temperature}) {
    const GenerateOptions options = {
        .max_tokens = c_.sample.max_tokens,
        .temperature = temperature,
        .top_p = temperature == 0 ? 1 : c_.sample.top_p,
        .seed = static_cast<uint64_t>(c_.seed),
    };
    ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                     generate(*model_, byte_ids(c_.sample.prompt), options));
    char title[64];
    std::snprintf(title, sizeof(title), "--- temperature %.2g\n", temperature);
    absl::StrAppend(&text, title, c_.sample.prompt, byte_text(ids), "\n");
    if (c_.sample.temperature == 0) break;
  }
  folder_->say(printable(text.substr(0, text.size() - 1)));
  return ending(kExitDisk, write_file_atomic(file, text));
}

absl::StatusOr<Evaluation> Run::measure() {
  if (job_) {
    return job_->evaluate(*eval_, pipeline_->stages(), stop_signal, &signal_);
  }
  return evaluate(*model_, *eval_, [] { return stop_signal() != 0; });
}

// What is not finite is neither saved nor exported.
absl::Status Run::check_weights() { return agree(check_own_weights()); }

absl::Status Run::check_own_weights() {
  for (const NamedTensor& t : trainer_->tensors()) {
    const bool finite = dispatch_float(t.value().dtype(), [&]<class T>() {
      const std::vector<T> values = t.value().to_vector<T>();
      return std::all_of(values.begin(), values.end(), [](T x) {
        return std::isfinite(static_cast<double>(x));
      });
    });
    if (finite) continue;
    return ending(kExitNotFinite,
                  absl::OutOfRangeError(absl::StrCat(
                      "step ", trainer_->steps_done(), ": weights of ", t.name,
                      " are not finite; go on from an earlier snapshot with a "
                      "lower optimizer.lr")));
  }
  return absl::OkStatus();
}

absl::Status Run::save() {
  RETURN_IF_ERROR(report_steps(0));
  if (!c_.train.save) return absl::OkStatus();
  const ProfileRange range(Range::kSnapshot);
  RETURN_IF_ERROR(check_weights());
  RETURN_IF_ERROR(agree(ending(kExitDisk, folder_->sync_metrics())));
  // Looking whether a large snapshot is whole takes longer than ranks wait.
  if (saved_ == trainer_->steps_done()) return absl::OkStatus();
  HostTensors host;
  SnapshotContents contents = trainer_->contents(host);
  contents.texts["config.resolved.toml"] = print_config(c_);
  contents.texts["config.json"] = model_config_.dump(2) + "\n";
  const SnapshotStore store = {snapshots(),
                               static_cast<int>(c_.train.keep_snapshots)};
  std::vector<std::string> warnings;
  RETURN_IF_ERROR(
      job_ ? job_->save(store, contents, &warnings)
           : ending(kExitDisk,
                    save_snapshot(store, contents, &warnings).status()));
  for (const std::string& warning : warnings) folder_->say(warning);
  saved_ = trainer_->steps_done();
  return absl::OkStatus();
}

absl::Status Run::stop() {
  const int number = stopped_by();
  RETURN_IF_ERROR(save());
  const std::string after =
      absl::StrCat("stopped by ", number == SIGINT ? "SIGINT" : "SIGTERM",
                   " after step ", trainer_->steps_done());
  const std::string next =
      !c_.train.save
          ? ", nothing is saved: train.save is false"
          : absl::StrCat(", saved in ", snapshots(), "; go on with: ",
                         request_.base.empty()
                             ? resume_command(request_.command_line)
                             : "the same command and --resume behind --");
  return ending(number == SIGINT ? kExitInterrupted : kExitTerminated,
                absl::CancelledError(after + next));
}

absl::Status Run::finish() {
  if (!c_.train.save) return absl::OkStatus();
  const ProfileRange range(Range::kExport);
  const std::string hf = folder_->file("hf");
  if (job_) {
    RETURN_IF_ERROR(job_->export_model(hf, dtype(), companions_, kShardBytes));
  } else {
    RETURN_IF_ERROR(
        ending(kExitDisk, export_hugging_face(hf, model_->named_tensors(),
                                              model_->config(), companions_)));
  }
  folder_->say(absl::StrCat("wrote ", hf));
  return absl::OkStatus();
}

absl::Status Run::write_profile() {
  RETURN_IF_ERROR(end_memory_log());
  if (c_.debug.profile) folder_->say(profile_table());
  if (!c_.debug.trace) return absl::OkStatus();
  RETURN_IF_ERROR(make_directories(folder_->file("trace")));
  return write_chrome_trace(folder_->file(
      absl::StrCat("trace/rank", job_ ? job_->rank() : 0, ".json")));
}

absl::Status run_training(const RunRequest& request) {
  install_stop_signals();
  return Run(request).go();
}

}  // namespace tapeline
