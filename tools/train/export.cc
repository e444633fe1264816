#include "tools/train/export.h"

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "runtime/file.h"
#include "runtime/status.h"
#include "tools/train/host_tensors.h"

namespace tapeline {
namespace {

std::string_view torch_name(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return "bfloat16";
    case DType::kF64:
      return "float64";
    default:
      return "float32";
  }
}

absl::Status write_files(const std::string& folder,
                         const std::vector<NamedTensor>& tensors,
                         const Json& config, const Companions& companions,
                         uint64_t max_shard_bytes) {
  HostTensors host;
  for (const NamedTensor& t : tensors) {
    host.add(t.name, t.value());
    for (const TensorCopy& copy : companions.copies) {
      if (copy.of == t.name) host.add(copy.name, t.value());
    }
  }
  RETURN_IF_ERROR(
      write_safetensors_shards(folder, host.list(), max_shard_bytes));
  for (const auto& [name, bytes] : companions.files) {
    RETURN_IF_ERROR(write_file_atomic(join_path(folder, name), bytes));
  }
  return write_json(join_path(folder, "config.json"), config);
}

}  // namespace

absl::Status export_hugging_face(const std::string& folder,
                                 const std::vector<NamedTensor>& tensors,
                                 Json config, const Companions& companions,
                                 uint64_t max_shard_bytes) {
  for (const NamedTensor& t : tensors) {
    if (t.parameter == nullptr) continue;
    // Older files say torch_dtype; both would contradict each other.
    config.erase("torch_dtype");
    config["dtype"] = torch_name(t.value().dtype());
    break;
  }
  const std::string temporary = absl::StrCat(folder, ".tmp-", getpid());
  const std::string old = absl::StrCat(folder, ".old-", getpid());
  RETURN_IF_ERROR(remove_path(temporary));
  RETURN_IF_ERROR(make_directories(temporary));
  const absl::Status written =
      write_files(temporary, tensors, config, companions, max_shard_bytes);
  if (!written.ok()) {
    remove_path(temporary).IgnoreError();
    return written;
  }
  const bool replaces = path_exists(folder);
  absl::Status moved = replaces ? rename_path(folder, old) : absl::OkStatus();
  if (moved.ok()) moved = rename_path(temporary, folder);
  if (!moved.ok()) {
    if (replaces && !path_exists(folder))
      rename_path(old, folder).IgnoreError();
    remove_path(temporary).IgnoreError();
    return moved;
  }
  RETURN_IF_ERROR(sync_directory(parent_path(folder)));
  return replaces ? remove_path(old) : absl::OkStatus();
}

}  // namespace tapeline
