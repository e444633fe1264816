// How a run joins the other processes of its job.
#include <csignal>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "dist/compare_settings.h"
#include "dist/pipeline/text.h"
#include "runtime/device.h"
#include "runtime/hash.h"
#include "tools/config/settings.h"
#include "tools/train/pipeline_connect.h"
#include "tools/train/pipeline_plan.h"
#include "tools/train/run_class.h"

namespace tapeline {
namespace {

std::string text_of(const std::string& value) { return value; }
std::string text_of(bool value) { return value ? "true" : "false"; }
std::string text_of(int64_t value) { return absl::StrCat(value); }
std::string text_of(double value) {
  const std::string brief = absl::StrFormat("%.15g", value);
  return std::strtod(brief.c_str(), nullptr) == value
             ? brief
             : absl::StrFormat("%.17g", value);
}
std::string text_of(const std::vector<std::string>& value) {
  return absl::StrJoin(value, " ");
}

std::string hash_of(const std::string& text) {
  return to_hex(hash_bytes(text.data(), text.size()));
}
std::string hash_of(const Corpus& corpus) {
  return absl::StrCat(corpus.tokens(), " bytes in ", corpus.documents.size(),
                      " documents, XXH3 ", hash_of(corpus.text));
}

}  // namespace

// All but what concerns a process alone; files by what is in them.
std::vector<Setting> Run::settings(const PipelinePlan& plan) const {
  static const std::set<std::string_view>& own =
      *new std::set<std::string_view>{
          "data.train",    "data.val",
          "debug.memory",  "debug.nan_poison",
          "debug.profile", "debug.trace",
          "device",        "offload.pinned_cap_mib",
          "pipeline.file", "pipeline.connect_timeout",
          "train.threads", "pipeline.timeout"};
  std::vector<Setting> out;
  visit_settings(
      c_, [&](const char* key, const auto& value, const Limits&, const char*) {
        if (!own.contains(key)) out.push_back({key, text_of(value)});
      });
  for (const auto& [key, value] : model_config_.object()) {
    out.push_back({absl::StrCat("model.", key), value.dump()});
  }
  out.push_back({"device", Device::current().kind() == DeviceKind::kCuda
                               ? "cuda"
                               : "cpu"});
  out.push_back({"data.train", hash_of(train_)});
  out.push_back({"data.val", hash_of(val_)});
  out.push_back({c_.pipeline.file.empty() ? "pipeline.schedule's actions"
                                          : "pipeline.file",
                 hash_of(schedule_text(plan.schedule))});
  // Rank 0 finds the snapshot for all.
  out.push_back({"--resume", request_.resume ? "given" : "not given"});
  return out;
}

absl::Status Run::join_job() {
  RETURN_IF_ERROR(check_pipeline_settings(c_));
  if (is_plain(c_, launch_.world)) return absl::OkStatus();
  if (c_.offload.warmup_steps > 0) {
    return absl::InvalidArgumentError(
        "offload.warmup_steps has no effect on the stages of a pipeline yet; "
        "set it to 0");
  }
  const std::string file =
      c_.pipeline.file.empty() ? "" : user_path(c_.pipeline.file);
  ASSIGN_OR_RETURN(PipelinePlan plan,
                   plan_pipeline(c_, *model_, launch_.world, file));
  absl::StatusOr<std::unique_ptr<Communicator>> communicator =
      connect_processes(launch_, plan, Device::current().kind(),
                        absl::Seconds(c_.pipeline.connect_timeout),
                        absl::Seconds(c_.pipeline.timeout), settings(plan),
                        [] { return stop_signal() != 0; });
  if (absl::IsCancelled(communicator.status())) {
    const bool interrupted = stop_signal() == SIGINT;
    return ending(interrupted ? kExitInterrupted : kExitTerminated,
                  absl::CancelledError(absl::StrCat(
                      "stopped by ", interrupted ? "SIGINT" : "SIGTERM",
                      " before the first step")));
  }
  RETURN_IF_ERROR(communicator.status());
  job_ = std::make_unique<PipelineJob>(std::move(plan), *model_,
                                       *std::move(communicator),
                                       absl::Seconds(c_.pipeline.timeout));
  return absl::OkStatus();
}

}  // namespace tapeline
