#include "tools/train/run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/access.h"
#include "runtime/device.h"
#include "runtime/file.h"
#include "runtime/profile.h"
#include "runtime/status.h"
#include "tools/data/batches.h"
#include "tools/data/corpus.h"
#include "tools/train/companions.h"
#include "tools/train/console_text.h"
#include "tools/train/evaluate.h"
#include "tools/train/exit_code.h"
#include "tools/train/export.h"
#include "tools/train/generate.h"
#include "tools/train/language_model.h"
#include "tools/train/provenance.h"
#include "tools/train/resume.h"
#include "tools/train/run_folder.h"
#include "tools/train/run_options.h"
#include "tools/train/stop_signal.h"
#include "tools/train/trainer.h"

namespace tapeline {
namespace {

double now() {
  return std::chrono::duration<double>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

class Run {
 public:
  explicit Run(const RunRequest& request)
      : request_(request), c_(request.config) {}

  absl::Status go() {
    RETURN_IF_ERROR(check_settings(c_));
    set_up_device();
    RETURN_IF_ERROR(load_data());
    RETURN_IF_ERROR(make_model());
    if (request_.resume) RETURN_IF_ERROR(find_snapshot());
    RETURN_IF_ERROR(make_trainer());
    RETURN_IF_ERROR(open_folder());
    RETURN_IF_ERROR(loop());
    RETURN_IF_ERROR(check_weights());
    RETURN_IF_ERROR(ending(kExitDisk, finish()));
    return ending(kExitDisk, write_profile());
  }

 private:
  std::string user_path(const std::string& path) const {
    return request_.base.empty() ? path : join_path(request_.base, path);
  }
  std::string snapshots() const { return join_path(path_, "snapshots"); }
  bool due(int64_t every) const {
    const int64_t step = trainer_->steps_done();
    return step == c_.train.steps || (every > 0 && step % every == 0);
  }

  void set_up_device();
  absl::StatusOr<Corpus> corpus(const std::string& spec);
  absl::Status load_data();
  absl::Status make_model();
  absl::Status find_snapshot();
  absl::Status make_trainer();
  absl::Status open_folder();
  absl::Status loop();
  absl::Status one_step();
  absl::Status check_finite(const StepRecord& record);
  absl::Status check_weights();
  absl::Status report();
  absl::Status sample(const std::string& file);
  absl::Status save();
  absl::Status stop();
  absl::Status finish();
  absl::Status write_profile();

  const RunRequest& request_;
  const Config& c_;
  std::string path_;  // of the run's folder
  Json model_config_;
  Corpus train_, val_;
  std::optional<TrainBatches> batches_;
  std::optional<EvalBatches> eval_;
  std::unique_ptr<LanguageModel> model_;
  Companions companions_;  // of the folder the weights came from
  std::unique_ptr<Trainer> trainer_;
  std::optional<Snapshot> snapshot_;
  MetricsCut metrics_;              // what stays of an earlier process's
  std::vector<std::string> notes_;  // to say once there is a log
  std::optional<RunFolder> folder_;
  bool evaluated_ = false;   // the step just done
  double step_seconds_ = 0;  // of a step, averaged
};

void Run::set_up_device() {
  int64_t threads = c_.train.threads;
  if (threads == 0) threads = std::thread::hardware_concurrency();
  Device::current().set_threads(
      static_cast<int>(std::max<int64_t>(1, threads)));
  Device::current().pool().set_poison(c_.debug.nan_poison);
  set_profile(c_.debug.trace     ? ProfileMode::kTrace
              : c_.debug.profile ? ProfileMode::kCount
                                 : ProfileMode::kOff);
}

absl::StatusOr<Corpus> Run::corpus(const std::string& spec) {
  return load_corpus(spec.starts_with("king_james:") ? spec : user_path(spec));
}

absl::Status Run::load_data() {
  ASSIGN_OR_RETURN(train_, corpus(c_.data.train));
  ASSIGN_OR_RETURN(
      batches_,
      TrainBatches::create(train_, c_.train.seq_len, c_.train.micro_batches,
                           static_cast<uint64_t>(c_.seed)));
  if (c_.data.val.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(val_, corpus(c_.data.val));
  eval_.emplace(val_, c_.train.seq_len, eval_tokens(c_.train.seq_len));
  return absl::OkStatus();
}

absl::Status Run::make_model() {
  const std::string from =
      c_.model.path.empty() ? "" : user_path(c_.model.path);
  ASSIGN_OR_RETURN(model_config_, model_config(c_, from));
  ASSIGN_OR_RETURN(model_,
                   make_language_model(model_config_, model_choices(c_)));
  RETURN_IF_ERROR(
      check_vocabulary(train_, c_.data.train, model_->vocabulary()));
  RETURN_IF_ERROR(check_vocabulary(val_, c_.data.val, model_->vocabulary()));
  path_ = user_path(join_path(c_.run.dir, c_.run.name));
  return absl::OkStatus();
}

// Under the lock: nobody else changes what is chosen here.
absl::Status Run::find_snapshot() {
  absl::StatusOr<RunFolder> folder = RunFolder::reopen(path_);
  if (folder.ok()) {
    folder_.emplace(*std::move(folder));
  } else if (absl::IsNotFound(folder.status())) {
    // A snapshot that is named may begin a run elsewhere.
    if (request_.snapshot.empty()) {
      return ending(kExitSnapshot, folder.status());
    }
  } else {
    return ending(
        absl::IsUnavailable(folder.status()) ? kExitBadInput : kExitDisk,
        folder.status());
  }
  ASSIGN_OR_RETURN(
      snapshot_,
      choose_snapshot(
          snapshots(),
          request_.snapshot.empty() ? "" : user_path(request_.snapshot),
          &notes_));
  RETURN_IF_ERROR(check_continues(*snapshot_, c_, model_config_));
  ASSIGN_OR_RETURN(metrics_, read_metrics(join_path(path_, "metrics.jsonl"),
                                          snapshot_->step));
  return absl::OkStatus();
}

absl::Status Run::make_trainer() {
  const std::string from =
      c_.model.path.empty() ? "" : user_path(c_.model.path);
  const std::vector<NamedTensor> tensors = model_->named_tensors();
  const DType dtype = c_.compute_dtype == "bf16" ? DType::kBf16 : DType::kF32;
  if (snapshot_) {
    RETURN_IF_ERROR(load(tensors, dtype, *snapshot_->tensors));
  } else if (!from.empty()) {
    ASSIGN_OR_RETURN(const SafetensorsReader reader,
                     SafetensorsReader::open(from));
    RETURN_IF_ERROR(load(tensors, dtype, reader));
    ASSIGN_OR_RETURN(companions_, read_companions(from, *model_, reader));
    if (!companions_.dropped.empty()) {
      notes_.push_back(absl::StrCat(
          companions_.dropped.size(), " tensors of ", from, ", first ",
          companions_.dropped[0],
          ", are not part of this model; the export will not have them"));
    }
  } else {
    initialize(tensors, dtype, static_cast<uint64_t>(c_.seed),
               model_->initializer_std());
  }
  model_->apply_training_choices();
  TrainerOptions options = trainer_options(c_);
  options.recompute = recomputed_layers(c_, model_->layers());
  trainer_ = std::make_unique<Trainer>(
      *model_, std::move(options), [this](int64_t step, int64_t m) {
        MicroBatch batch = batches_->get(step, m);
        return HostBatch{std::move(batch.ids), std::move(batch.labels),
                         std::move(batch.cu_seqlens)};
      });
  if (!snapshot_) return absl::OkStatus();
  RETURN_IF_ERROR(trainer_->restore(*snapshot_, &notes_));
  if (!from.empty()) {
    // The weights are the snapshot's; what else the folder held is still there.
    ASSIGN_OR_RETURN(const SafetensorsReader reader,
                     SafetensorsReader::open(from));
    ASSIGN_OR_RETURN(companions_, read_companions(from, *model_, reader));
  }
  notes_.push_back(absl::StrCat("resumed from ", snapshot_->path));
  return absl::OkStatus();
}

absl::Status Run::open_folder() {
  std::string moved;
  if (!folder_) {
    absl::StatusOr<RunFolder> folder =
        RunFolder::create(path_, print_config(c_), &moved);
    if (!folder.ok()) {
      const bool taken = absl::IsUnavailable(folder.status()) ||
                         absl::IsAlreadyExists(folder.status());
      return ending(taken ? kExitBadInput : kExitDisk, folder.status());
    }
    folder_.emplace(*std::move(folder));
  }
  RETURN_IF_ERROR(ending(kExitDisk, folder_->begin()));
  if (!moved.empty()) {
    folder_->say(absl::StrCat("the earlier run is now in ", moved));
  }
  for (const std::string& note : notes_) folder_->say(note);
  const auto write = [&]() -> absl::Status {
    const int64_t step = trainer_->steps_done();
    const std::string suffix =
        request_.resume ? absl::StrCat(".resumed-", step) : "";
    RETURN_IF_ERROR(write_file_atomic(folder_->file("config.resolved.toml"),
                                      print_config(c_)));
    RETURN_IF_ERROR(write_json(
        folder_->file(absl::StrCat("provenance", suffix, ".json")),
        provenance(request_.command_line, static_cast<uint64_t>(c_.seed),
                   Device::current().threads().threads())));
    RETURN_IF_ERROR(set_aside_later_snapshots(snapshots(), step));
    if (metrics_.cuts) {
      RETURN_IF_ERROR(
          write_file_atomic(folder_->file("metrics.jsonl"), metrics_.kept));
    }
    evaluated_ = metrics_.evaluated;
    HostTensors host;
    return check_disk_space(snapshots(),
                            snapshot_bytes(trainer_->contents(host)),
                            static_cast<int>(c_.train.keep_snapshots) + 1);
  };
  return ending(kExitDisk, write());
}

absl::Status Run::loop() {
  folder_->say(absl::StrCat(
      "training ", c_.run.name, ": ", parameter_count(trainer_->tensors()),
      " parameters, ", train_.bytes(), " bytes of text, ",
      c_.train.micro_batches * c_.train.seq_len, " tokens a step, ",
      Device::current().threads().threads(), " threads"));
  // What an interrupted run still owes for its last step.
  if (snapshot_) {
    RETURN_IF_ERROR(report());
    if (stop_signal() != 0) return stop();
  }
  while (trainer_->steps_done() < c_.train.steps) {
    RETURN_IF_ERROR(one_step());
    if (stop_signal() != 0) return stop();
    RETURN_IF_ERROR(report());
    if (stop_signal() != 0) return stop();
    if (due(c_.train.snapshot_every)) {
      RETURN_IF_ERROR(save());
    }
  }
  return absl::OkStatus();
}

absl::Status Run::one_step() {
  Pool& pool = Device::current().pool();
  pool.reset_peak();
  const int64_t next = trainer_->steps_done() + 1;
  const double start = now();
  StepRecord record = trainer_->step(c_.debug.hash_every > 0 &&
                                     next % c_.debug.hash_every == 0);
  record.time_unix = now();
  const double seconds = record.time_unix - start;
  evaluated_ = false;
  record.step_ms = 1000 * seconds;
  record.tokens_per_s =
      static_cast<double>(c_.train.seq_len * c_.train.micro_batches) / seconds;
  record.pool_peak_bytes = pool.stats().peak;
  record.rss_peak_bytes = peak_resident_bytes();
  step_seconds_ =
      step_seconds_ == 0 ? seconds : 0.95 * step_seconds_ + 0.05 * seconds;
  RETURN_IF_ERROR(ending(kExitDisk, folder_->append_metrics(to_json(record))));
  const int64_t left = c_.train.steps - record.step;
  if (record.step == 1 || due(c_.train.log_every)) {
    folder_->say(step_line(record, c_.train.steps,
                           static_cast<double>(left) * step_seconds_));
  }
  return check_finite(record);
}

absl::Status Run::check_finite(const StepRecord& record) {
  if (trainer_->anomaly()) {
    return ending(kExitNotFinite, absl::OutOfRangeError(absl::StrCat(
                                      "step ", record.step, ": ",
                                      to_string(*trainer_->anomaly()))));
  }
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
    const Evaluation e =
        evaluate(*model_, *eval_, [] { return stop_signal() != 0; });
    if (stop_signal() != 0) return absl::OkStatus();
    evaluated_ = true;
    const EvalRecord record{step, e.loss, e.bits_per_byte, e.bytes};
    RETURN_IF_ERROR(
        ending(kExitDisk, folder_->append_metrics(to_json(record))));
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
                        ": the validation loss is not finite; go on from an "
                        "earlier snapshot with a lower optimizer.lr")));
    }
  }
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

// What is not finite is neither saved nor exported.
absl::Status Run::check_weights() {
  for (const NamedTensor& t : trainer_->tensors()) {
    const auto values = read<float>(t.value());
    const float* begin = values.view().data;
    const float* end = begin + t.value().elements();
    if (std::all_of(begin, end, [](float x) { return std::isfinite(x); })) {
      continue;
    }
    return ending(kExitNotFinite,
                  absl::OutOfRangeError(absl::StrCat(
                      "step ", trainer_->steps_done(), ": weights of ", t.name,
                      " are not finite; go on from an earlier snapshot with a "
                      "lower optimizer.lr")));
  }
  return absl::OkStatus();
}

absl::Status Run::save() {
  const ProfileRange range(Range::kSnapshot);
  RETURN_IF_ERROR(check_weights());
  RETURN_IF_ERROR(ending(kExitDisk, folder_->sync_metrics()));
  HostTensors host;
  SnapshotContents contents = trainer_->contents(host);
  contents.texts["config.resolved.toml"] = print_config(c_);
  contents.texts["config.json"] = model_config_.dump(2) + "\n";
  const SnapshotStore store = {snapshots(),
                               static_cast<int>(c_.train.keep_snapshots)};
  std::vector<std::string> warnings;
  RETURN_IF_ERROR(
      ending(kExitDisk, save_snapshot(store, contents, &warnings).status()));
  for (const std::string& warning : warnings) folder_->say(warning);
  return absl::OkStatus();
}

absl::Status Run::stop() {
  const int number = stop_signal();
  RETURN_IF_ERROR(save());
  return ending(
      number == SIGINT ? kExitInterrupted : kExitTerminated,
      absl::CancelledError(absl::StrCat(
          "stopped by ", number == SIGINT ? "SIGINT" : "SIGTERM",
          " after step ", trainer_->steps_done(), ", saved in ", snapshots(),
          "; go on with: ",
          request_.base.empty() ? resume_command(request_.command_line)
                                : "the same command and --resume behind --")));
}

absl::Status Run::finish() {
  const ProfileRange range(Range::kExport);
  const std::string hf = folder_->file("hf");
  RETURN_IF_ERROR(export_hugging_face(hf, model_->named_tensors(),
                                      model_->config(), companions_));
  folder_->say(absl::StrCat("wrote ", hf));
  return absl::OkStatus();
}

absl::Status Run::write_profile() {
  if (c_.debug.profile) folder_->say(profile_table());
  if (!c_.debug.trace) return absl::OkStatus();
  RETURN_IF_ERROR(make_directories(folder_->file("trace")));
  return write_chrome_trace(folder_->file("trace/rank0.json"));
}

}  // namespace

absl::Status run_training(const RunRequest& request) {
  install_stop_signals();
  return Run(request).go();
}

}  // namespace tapeline
