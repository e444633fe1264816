// What a run does before its first step: nothing is written until all of it is
// right.
#include <algorithm>
#include <cmath>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/device.h"
#include "runtime/profile.h"
#include "runtime/safetensors.h"
#include "tools/train/evaluate.h"
#include "tools/train/host_tensors.h"
#include "tools/train/open_device.h"
#include "tools/train/provenance.h"
#include "tools/train/resume.h"
#include "tools/train/run_class.h"

namespace tapeline {

absl::Status Run::set_up_device() {
  ASSIGN_OR_RETURN(launch_, read_launch(process_environment()));
  ASSIGN_OR_RETURN(device_, open_device(c_.device, launch_.local_rank));
  if (device_) scope_.emplace(*device_);
  if (!device_ && c_.debug.cuda_first > 0) {
    return absl::InvalidArgumentError(
        "debug.cuda_first watches CUDA, but this run is on a CPU; set "
        "device=cuda, or debug.cuda_first=0");
  }
  int64_t threads = c_.train.threads;
  if (threads == 0) {
    threads = std::thread::hardware_concurrency() / launch_.local_world;
  }
  Device::current().set_threads(
      static_cast<int>(std::max<int64_t>(1, threads)));
  Device::current().pool().set_poison(c_.debug.nan_poison);
  Device::current().pinned().set_cap(c_.offload.pinned_cap_mib << 20);
  set_profile(c_.debug.trace     ? ProfileMode::kTrace
              : c_.debug.profile ? ProfileMode::kCount
                                 : ProfileMode::kOff);
  return absl::OkStatus();
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

// The leader chooses; the others read what it has chosen.
absl::Status Run::find_snapshot() {
  if (!job_) return choose();
  absl::StatusOr<std::string> chosen = std::string();
  if (leader()) {
    const absl::Status status = choose();
    chosen = status.ok() ? absl::StatusOr<std::string>(snapshot_->path)
                         : absl::StatusOr<std::string>(status);
  }
  ASSIGN_OR_RETURN(const std::string path, job_->from_leader(chosen));
  absl::Status loaded;
  if (!leader()) {
    absl::StatusOr<Snapshot> snapshot = load_snapshot(path);
    loaded = ending(kExitSnapshot, snapshot.status());
    if (snapshot.ok()) snapshot_ = *std::move(snapshot);
  }
  return agree(loaded);
}

// Under the lock: nobody else changes what is chosen here.
absl::Status Run::choose() {
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

// The tensors of this process, and the trainer of all.
absl::Status Run::make_trainer() { return agree(make_tensors()); }

absl::Status Run::make_tensors() {
  const std::string from =
      c_.model.path.empty() ? "" : user_path(c_.model.path);
  const std::vector<NamedTensor> tensors =
      job_ ? job_->tensors() : model_->named_tensors();
  const DType dtype = this->dtype();
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
  ASSIGN_OR_RETURN(options.recompute, recomputed_layers(c_, model_->layers()));
  const BatchFunction batch = [this](int64_t step, int64_t m) {
    MicroBatch mb = batches_->get(step, m);
    return HostBatch{std::move(mb.ids), std::move(mb.labels),
                     std::move(mb.cu_seqlens)};
  };
  if (job_) {
    auto made = std::make_unique<PipelineTrainer>(*model_, std::move(options),
                                                  batch, *job_, dtype);
    pipeline_ = made.get();
    trainer_ = std::move(made);
  } else {
    trainer_ = std::make_unique<Trainer>(*model_, std::move(options), batch);
  }
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
  uint64_t snapshot = 0;  // bytes, of all ranks
  if (c_.train.save) {
    HostTensors host;
    snapshot = snapshot_bytes(trainer_->contents(host));
    if (job_) {
      ASSIGN_OR_RETURN(snapshot, job_->sum("bytes of a snapshot", snapshot));
    }
  }
  if (!leader()) folder_.emplace(RunFolder::of_another(path_));
  RETURN_IF_ERROR(agree(leader() ? make_folder(snapshot) : absl::OkStatus()));
  if (!job_) return absl::OkStatus();
  // The leader alone has read the metrics, and all evaluate together.
  ASSIGN_OR_RETURN(const uint64_t evaluated,
                   job_->sum("evaluations", evaluated_ ? 1 : 0));
  evaluated_ = evaluated > 0;
  return absl::OkStatus();
}

absl::Status Run::make_folder(uint64_t snapshot) {
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
    if (!c_.train.save) return absl::OkStatus();
    return check_disk_space(snapshots(), snapshot,
                            static_cast<int>(c_.train.keep_snapshots) + 1);
  };
  return ending(kExitDisk, write());
}

}  // namespace tapeline
