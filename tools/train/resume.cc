#include "tools/train/resume.h"

#include "absl/strings/str_cat.h"
#include "runtime/file.h"
#include "runtime/status.h"
#include "runtime/toml.h"
#include "tools/train/exit_code.h"

namespace tapeline {
namespace {

std::string shown(const Json* value) {
  return value == nullptr ? "absent" : value->dump();
}

absl::Status differs(const Snapshot& snapshot, const std::string& key,
                     const Json* here, const Json* there) {
  return absl::InvalidArgumentError(absl::StrCat(
      key, " is ", shown(here), ", but ", shown(there), " in ", snapshot.path,
      "; set it back, or train under another run.name"));
}

absl::Status check_model(const Snapshot& snapshot, const Json& now) {
  ASSIGN_OR_RETURN(const Json then,
                   read_json(join_path(snapshot.path, "config.json")));
  if (!then.is_object()) {
    return ending(kExitSnapshot,
                  absl::DataLossError(absl::StrCat(
                      snapshot.path, "/config.json is no JSON object")));
  }
  for (const auto& [key, value] : now.object()) {
    const Json* other = then.find(key);
    if (other == nullptr || !(*other == value)) {
      return differs(snapshot, absl::StrCat("model.", key), &value, other);
    }
  }
  for (const auto& [key, value] : then.object()) {
    if (now.find(key) != nullptr) continue;
    return differs(snapshot, absl::StrCat("model.", key), nullptr, &value);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Snapshot> choose_snapshot(const std::string& root,
                                         const std::string& path,
                                         std::vector<std::string>* notes) {
  if (!path.empty()) {
    absl::StatusOr<Snapshot> one = load_snapshot(path);
    if (one.ok()) return one;
    return ending(
        absl::IsNotFound(one.status()) ? kExitBadInput : kExitSnapshot,
        one.status());
  }
  absl::StatusOr<Snapshot> newest = load_latest_snapshot(root, notes);
  if (newest.ok()) return newest;
  if (absl::IsNotFound(newest.status())) {
    return ending(kExitSnapshot,
                  absl::NotFoundError(
                      absl::StrCat(newest.status().message(),
                                   "; train from the start without --resume")));
  }
  return ending(absl::IsDataLoss(newest.status()) ? kExitSnapshot : kExitDisk,
                newest.status());
}

absl::Status check_continues(const Snapshot& snapshot, const Config& config,
                             const Json& model_config) {
  RETURN_IF_ERROR(check_model(snapshot, model_config));
  if (config.train.steps < snapshot.step) {
    return absl::InvalidArgumentError(absl::StrCat(
        "train.steps is ", config.train.steps, ", but ", snapshot.path,
        " is past it; raise train.steps, or name an earlier snapshot with "
        "--resume=PATH"));
  }
  // Not load_config: settings that no longer pass its checks are no reason to
  // refuse the snapshot.
  ASSIGN_OR_RETURN(const std::vector<TomlEntry> then,
                   read_toml(join_path(snapshot.path, "config.resolved.toml")));
  const std::pair<std::string, Json> fixed[] = {
      {"seed", config.seed},
      {"data.train", config.data.train},
      {"train.seq_len", config.train.seq_len},
      {"train.micro_batches", config.train.micro_batches},
  };
  for (const auto& [key, value] : fixed) {
    const Json* other = nullptr;
    for (const TomlEntry& entry : then) {
      if (toml_key(entry.path) == key) other = &entry.value;
    }
    if (other == nullptr || !(*other == value)) {
      return differs(snapshot, key, &value, other);
    }
  }
  return absl::OkStatus();
}

}  // namespace tapeline
