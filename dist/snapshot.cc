#include "dist/snapshot.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdio>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dist/snapshot_manifest.h"
#include "runtime/file.h"
#include "runtime/hash.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

constexpr std::string_view kPrefix = "step_";

// The step of "step_0000120"; nothing for any other name.
std::optional<int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  int64_t step = 0;
  const auto [end, error] =
      std::from_chars(name.data(), name.data() + name.size(), step);
  if (error != std::errc() || end != name.data() + name.size() ||
      name.size() < 7) {
    return std::nullopt;
  }
  return step;
}

std::string nonce() {
  static std::atomic<int> count{0};
  return absl::StrCat(getpid(), "-", count.fetch_add(1));
}

// Folders that a crash left behind: unfinished saves and half-removed ones.
bool is_leftover(const std::string& name) {
  return name.starts_with(".trash-") || name.starts_with(".LATEST.tmp-") ||
         (name.starts_with(kPrefix) && name.find(".tmp-") != std::string::npos);
}

absl::Status remove_leftovers(const std::string& root) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, list_directory(root));
  for (const std::string& name : names) {
    if (is_leftover(name)) RETURN_IF_ERROR(remove_path(join_path(root, name)));
  }
  return absl::OkStatus();
}

// A free name: <path>.<word>, <path>.<word>-2, ...
absl::Status set_aside(const std::string& path, std::string_view word) {
  std::string to = path + "." + std::string(word);
  for (int k = 2; path_exists(to); ++k) {
    to = absl::StrCat(path, ".", std::string(word), "-", k);
  }
  RETURN_IF_ERROR(rename_path(path, to));
  return sync_directory(parent_path(path));
}

std::string part_file(int part) {
  char name[48];
  std::snprintf(name, sizeof(name), "rank%05d.safetensors", part);
  return name;
}

Json tensor_index(const std::vector<NamedBytes>& tensors,
                  const std::string& file) {
  Json::Object index;
  for (const NamedBytes& t : tensors) {
    Json::Array shape;
    for (int64_t extent : t.shape) shape.emplace_back(extent);
    Json entry;
    entry["dtype"] = to_safetensors(t.dtype);
    entry["shape"] = std::move(shape);
    entry["file"] = file;
    entry["xxh3"] = to_hex(hash_bytes(t.data, t.bytes()));
    index.emplace_back(t.name, std::move(entry));
  }
  return index;
}

// What one rank wrote, as it tells the one that writes the manifest.
struct Part {
  Manifest::File file;
  uint64_t bytes = 0;  // of tensors
  Json tensors;
};

std::string part_text(const Part& part) {
  Json json;
  json["name"] = part.file.name;
  json["bytes"] = part.file.bytes;
  json["xxh3"] = part.file.xxh3;
  json["tensor_bytes"] = part.bytes;
  json["tensors"] = part.tensors;
  return json.dump();
}

absl::StatusOr<Part> parse_part(const std::string& text) {
  ASSIGN_OR_RETURN(const Json json, parse_json(text, "part of a snapshot"));
  const Json *name = json.find("name"), *bytes = json.find("bytes"),
             *xxh3 = json.find("xxh3"), *all = json.find("tensor_bytes"),
             *tensors = json.find("tensors");
  if (name == nullptr || bytes == nullptr || xxh3 == nullptr ||
      all == nullptr || tensors == nullptr) {
    return absl::InternalError("a part of a snapshot is not described whole");
  }
  return Part{{name->string(), bytes->integer(), xxh3->string()},
              static_cast<uint64_t>(all->integer()),
              *tensors};
}

absl::Status write_index(const std::string& folder,
                         const std::vector<Part>& parts) {
  uint64_t bytes = 0;
  Json::Object map;
  for (const Part& part : parts) {
    bytes += part.bytes;
    for (const auto& [name, entry] : part.tensors.object()) {
      map.emplace_back(name, part.file.name);
    }
  }
  Json index;
  index["metadata"]["total_size"] = bytes;
  index["weight_map"] = std::move(map);
  return write_file_atomic(join_path(folder, kIndexFile), index.dump(1) + "\n");
}

// All but the parts.
absl::Status write_rest(const std::string& folder,
                        const SnapshotContents& contents,
                        const std::vector<Part>& parts) {
  Manifest manifest;
  manifest.format = kSnapshotFormat;
  manifest.step = contents.step;
  manifest.layout = contents.layout;
  Json::Object tensors;
  for (const Part& part : parts) {
    manifest.files.push_back(part.file);
    const Json::Object& more = part.tensors.object();
    tensors.insert(tensors.end(), more.begin(), more.end());
  }
  manifest.tensors = std::move(tensors);
  if (parts.size() > 1) {
    RETURN_IF_ERROR(write_index(folder, parts));
    ASSIGN_OR_RETURN(manifest.files.emplace_back(),
                     fingerprint(folder, kIndexFile));
  }
  std::map<std::string, std::string> texts = contents.texts;
  texts[kStateFile] = contents.state.dump(1) + "\n";
  for (const auto& [name, text] : texts) {
    RETURN_IF_ERROR(write_file_atomic(join_path(folder, name), text));
    ASSIGN_OR_RETURN(Manifest::File file, fingerprint(folder, name));
    manifest.files.push_back(std::move(file));
  }
  return write_file_atomic(join_path(folder, kManifestFile),
                           manifest_text(manifest));
}

absl::Status point_latest(const std::string& root, const std::string& name) {
  return write_file_atomic(join_path(root, "LATEST"), name + "\n");
}

// Removes what is older than the `keep` newest usable snapshots.
absl::Status retain(const SnapshotStore& store) {
  int usable = 0;
  ASSIGN_OR_RETURN(const std::vector<std::string> paths,
                   list_snapshots(store.root));
  for (const std::string& path : paths) {
    if (usable < std::max(2, store.keep)) {
      if (check_snapshot(path, /*hashes=*/false).ok()) ++usable;
      continue;
    }
    // Renamed first: a half-removed folder must not look like a snapshot.
    const std::string trash =
        join_path(store.root, absl::StrCat(".trash-", nonce()));
    RETURN_IF_ERROR(rename_path(path, trash));
    RETURN_IF_ERROR(remove_path(trash));
  }
  return absl::OkStatus();
}

}  // namespace

std::string snapshot_name(int64_t step) {
  char name[32];
  std::snprintf(name, sizeof(name), "step_%07lld",
                static_cast<long long>(step));
  return name;
}

absl::StatusOr<std::vector<std::string>> list_snapshots(
    const std::string& root) {
  const absl::StatusOr<std::vector<std::string>> names = list_directory(root);
  if (absl::IsNotFound(names.status())) return std::vector<std::string>();
  if (!names.ok()) return names.status();
  std::vector<std::pair<int64_t, std::string>> found;
  for (const std::string& name : *names) {
    const std::string path = join_path(root, name);
    const std::optional<int64_t> step = step_of(name);
    if (step && is_directory(path)) found.emplace_back(*step, path);
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<std::string> paths;
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  return paths;
}

uint64_t snapshot_bytes(const SnapshotContents& contents) {
  uint64_t bytes = 64 << 10;
  for (const NamedBytes& t : contents.tensors) bytes += t.bytes() + 512;
  for (const auto& [name, text] : contents.texts) bytes += text.size();
  return bytes;
}

absl::Status check_disk_space(const std::string& folder, uint64_t bytes,
                              int count) {
  ASSIGN_OR_RETURN(const uint64_t free, free_disk_bytes(folder));
  const auto wanted = static_cast<uint64_t>(static_cast<double>(bytes) *
                                            static_cast<double>(count) * 1.05);
  if (free >= wanted) return absl::OkStatus();
  const auto mib = [](uint64_t b) {
    return absl::StrCat((b >> 20) + 1, " MiB");
  };
  return absl::ResourceExhaustedError(absl::StrCat(
      folder, ": ", count, count == 1 ? " snapshot needs " : " snapshots need ",
      mib(wanted), ", but ", mib(free),
      " are free; free some space or set run.dir to another disk"));
}

absl::StatusOr<std::string> begin_snapshot(const SnapshotStore& store,
                                           int64_t step, uint64_t bytes) {
  RETURN_IF_ERROR(make_directories(store.root));
  RETURN_IF_ERROR(remove_leftovers(store.root));
  const std::string name = snapshot_name(step);
  const std::string path = join_path(store.root, name);
  if (path_exists(path)) {
    if (check_snapshot(path, /*hashes=*/true).ok()) {
      // The process that saved it may have died just before this.
      RETURN_IF_ERROR(point_latest(store.root, name));
      return std::string();
    }
    RETURN_IF_ERROR(set_aside(path, "damaged"));
  }
  RETURN_IF_ERROR(check_disk_space(store.root, bytes, /*count=*/1));
  const std::string temporary = absl::StrCat(path, ".tmp-", nonce());
  RETURN_IF_ERROR(make_directories(temporary));
  return temporary;
}

absl::StatusOr<std::string> write_snapshot_part(
    const std::string& folder, int part,
    const std::vector<NamedBytes>& tensors) {
  const std::string file = part_file(part);
  RETURN_IF_ERROR(write_safetensors(join_path(folder, file), tensors));
  Part out;
  ASSIGN_OR_RETURN(out.file, fingerprint(folder, file));
  for (const NamedBytes& t : tensors) out.bytes += t.bytes();
  out.tensors = tensor_index(tensors, file);
  return part_text(out);
}

absl::StatusOr<std::string> end_snapshot(const SnapshotStore& store,
                                         const std::string& folder,
                                         const SnapshotContents& contents,
                                         const std::vector<std::string>& parts,
                                         std::vector<std::string>* warnings) {
  std::vector<Part> written;
  for (const std::string& text : parts) {
    ASSIGN_OR_RETURN(written.emplace_back(), parse_part(text));
  }
  RETURN_IF_ERROR(write_rest(folder, contents, written));
  const std::string name = snapshot_name(contents.step);
  const std::string path = join_path(store.root, name);
  RETURN_IF_ERROR(rename_path(folder, path));
  RETURN_IF_ERROR(sync_directory(store.root));
  RETURN_IF_ERROR(point_latest(store.root, name));
  if (const absl::Status removed = retain(store); !removed.ok()) {
    warnings->push_back(
        absl::StrCat("an old snapshot stays: ", removed.message()));
  }
  return path;
}

absl::StatusOr<std::string> save_snapshot(const SnapshotStore& store,
                                          const SnapshotContents& contents,
                                          std::vector<std::string>* warnings) {
  ASSIGN_OR_RETURN(
      const std::string folder,
      begin_snapshot(store, contents.step, snapshot_bytes(contents)));
  if (folder.empty()) {
    return join_path(store.root, snapshot_name(contents.step));
  }
  absl::StatusOr<std::string> saved =
      write_snapshot_part(folder, 0, contents.tensors);
  if (saved.ok()) {
    saved = end_snapshot(store, folder, contents, {*saved}, warnings);
  }
  // Best effort; the next save tries again.
  if (!saved.ok()) remove_path(folder).IgnoreError();
  return saved;
}

absl::Status set_aside_later_snapshots(const std::string& root, int64_t step) {
  ASSIGN_OR_RETURN(const std::vector<std::string> paths, list_snapshots(root));
  for (const std::string& path : paths) {
    if (*step_of(path.substr(path.rfind('/') + 1)) <= step) continue;
    RETURN_IF_ERROR(set_aside(path, "superseded"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Snapshot> load_snapshot(const std::string& path) {
  if (!is_directory(path)) {
    return absl::NotFoundError(
        absl::StrCat(path,
                     " is no snapshot folder; give the path of a step_* "
                     "folder"));
  }
  ASSIGN_OR_RETURN(const Manifest manifest,
                   check_snapshot(path, /*hashes=*/true));
  std::string name = path;
  while (name.size() > 1 && name.ends_with('/')) name.pop_back();
  name = name.substr(name.rfind('/') + 1);
  if (const auto step = step_of(name); step && *step != manifest.step) {
    return absl::DataLossError(
        absl::StrCat(path, " holds step ", manifest.step,
                     "; the folder was renamed or mixed up"));
  }
  Snapshot snapshot;
  snapshot.path = path;
  snapshot.step = manifest.step;
  snapshot.layout = manifest.layout;
  ASSIGN_OR_RETURN(snapshot.state, read_json(join_path(path, kStateFile)));
  const bool parts = path_exists(join_path(path, kIndexFile));
  ASSIGN_OR_RETURN(SafetensorsReader reader,
                   SafetensorsReader::open(
                       join_path(path, parts ? kIndexFile : kTensorFile)));
  snapshot.tensors = std::make_unique<SafetensorsReader>(std::move(reader));
  return snapshot;
}

absl::StatusOr<Snapshot> load_latest_snapshot(
    const std::string& root, std::vector<std::string>* rejected) {
  ASSIGN_OR_RETURN(const std::vector<std::string> paths, list_snapshots(root));
  for (const std::string& path : paths) {
    absl::StatusOr<Snapshot> snapshot = load_snapshot(path);
    if (snapshot.ok()) return snapshot;
    rejected->push_back(absl::StrCat(
        "snapshot ", path, " is not usable: ", snapshot.status().message()));
  }
  if (paths.empty()) {
    return absl::NotFoundError(absl::StrCat("no snapshot in ", root));
  }
  return absl::DataLossError(absl::StrCat(
      "no usable snapshot in ", root, ": ", rejected->front(),
      "; restore one from a copy, or train from the start without --resume"));
}

}  // namespace tapeline
