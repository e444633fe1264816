#include "tools/train/export.h"

#include <unistd.h>

#include <cstdio>
#include <map>
#include <utility>

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

}  // namespace

void add_with_copies(const std::vector<NamedTensor>& tensors,
                     const Companions& companions, HostTensors& host) {
  for (const NamedTensor& t : tensors) {
    host.add(t.name, t.value());
    for (const TensorCopy& copy : companions.copies) {
      if (copy.of == t.name) host.add(copy.name, t.value());
    }
  }
}

std::vector<std::vector<NamedBytes>> cut_shards(
    const std::vector<NamedBytes>& tensors, uint64_t max_shard_bytes) {
  std::vector<std::vector<NamedBytes>> out;
  uint64_t bytes = 0;
  for (const NamedBytes& t : tensors) {
    if (out.empty() || bytes + t.bytes() > max_shard_bytes) {
      out.emplace_back();
      bytes = 0;
    }
    out.back().push_back(t);
    bytes += t.bytes();
  }
  return out;
}

std::string shard_name(size_t shard, size_t shards) {
  if (shards == 1) return "model.safetensors";
  char name[64];
  std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", shard,
                shards);
  return name;
}

absl::Status write_shard_index(const std::string& folder,
                               const std::vector<std::string>& ranks,
                               size_t shards) {
  if (shards == 1) return absl::OkStatus();
  std::map<std::string, std::string> files;
  int64_t total = 0;
  for (const std::string& text : ranks) {
    ASSIGN_OR_RETURN(const Json rank, parse_json(text, "shards of a rank"));
    for (const auto& [file, tensors] : rank.object()) {
      for (const auto& [name, bytes] : tensors.object()) {
        files[name] = file;
        total += bytes.integer();
      }
    }
  }
  Json::Object map;
  for (const auto& [name, file] : files) map.emplace_back(name, file);
  Json index;
  index["metadata"]["total_size"] = total;
  index["weight_map"] = std::move(map);
  return write_json(join_path(folder, "model.safetensors.index.json"), index);
}

absl::Status write_companions(const std::string& folder, Json config,
                              DType dtype, const Companions& companions) {
  // Older files say torch_dtype; both would contradict each other.
  config.erase("torch_dtype");
  config["dtype"] = torch_name(dtype);
  for (const auto& [name, bytes] : companions.files) {
    RETURN_IF_ERROR(write_file_atomic(join_path(folder, name), bytes));
  }
  return write_json(join_path(folder, "config.json"), config);
}

absl::Status replace_folder(const std::string& temporary,
                            const std::string& folder) {
  const std::string old = absl::StrCat(folder, ".old-", getpid());
  const bool replaces = path_exists(folder);
  absl::Status moved = replaces ? rename_path(folder, old) : absl::OkStatus();
  if (moved.ok()) moved = rename_path(temporary, folder);
  if (!moved.ok()) {
    if (replaces && !path_exists(folder))
      rename_path(old, folder).IgnoreError();
    return moved;
  }
  RETURN_IF_ERROR(sync_directory(parent_path(folder)));
  return replaces ? remove_path(old) : absl::OkStatus();
}

absl::Status export_hugging_face(const std::string& folder,
                                 const std::vector<NamedTensor>& tensors,
                                 Json config, const Companions& companions,
                                 uint64_t max_shard_bytes) {
  DType dtype = DType::kF32;
  for (const NamedTensor& t : tensors) {
    if (t.parameter == nullptr) continue;
    dtype = t.value().dtype();
    break;
  }
  const std::string temporary = absl::StrCat(folder, ".tmp-", getpid());
  RETURN_IF_ERROR(remove_path(temporary));
  RETURN_IF_ERROR(make_directories(temporary));
  const auto write = [&]() -> absl::Status {
    HostTensors host;
    add_with_copies(tensors, companions, host);
    RETURN_IF_ERROR(
        write_safetensors_shards(temporary, host.list(), max_shard_bytes));
    return write_companions(temporary, std::move(config), dtype, companions);
  };
  absl::Status done = write();
  if (done.ok()) done = replace_folder(temporary, folder);
  if (!done.ok()) remove_path(temporary).IgnoreError();
  return done;
}

}  // namespace tapeline
