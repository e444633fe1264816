#include "dist/snapshot_manifest.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "runtime/file.h"
#include "runtime/hash.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

constexpr size_t kReadBytes = size_t{4} << 20;

Json to_json(const Manifest& m) {
  Json json;
  json["format"] = m.format;
  json["step"] = m.step;
  json["layout"] = m.layout;
  Json& files = json["files"];
  files = Json::Object{};
  for (const Manifest::File& file : m.files) {
    Json& entry = files[file.name];
    entry["bytes"] = file.bytes;
    entry["xxh3"] = file.xxh3;
  }
  json["tensors"] = m.tensors;
  return json;
}

absl::Status damaged(std::string_view name, std::string_view what) {
  return absl::DataLossError(
      absl::StrCat(absl::string_view(name.data(), name.size()), " ",
                   absl::string_view(what.data(), what.size())));
}

const Json* find(const Json& json, std::string_view key,
                 bool (Json::*is)() const) {
  const Json* value = json.find(key);
  return value != nullptr && (value->*is)() ? value : nullptr;
}

// A name in the folder itself.
bool plain(const std::string& name) {
  return !name.empty() && name.find('/') == std::string::npos && name != "." &&
         name != "..";
}

}  // namespace

std::string manifest_text(const Manifest& manifest) {
  Json json = to_json(manifest);
  const std::string body = json.dump(1);
  json["xxh3"] = to_hex(hash_bytes(body.data(), body.size()));
  return json.dump(1) + "\n";
}

absl::StatusOr<Manifest> parse_manifest(std::string_view text,
                                        std::string_view name) {
  const absl::StatusOr<Json> json = parse_json(text, name);
  if (!json.ok()) return absl::DataLossError(json.status().message());
  Manifest m;
  const Json* format = find(*json, "format", &Json::is_integer);
  if (format == nullptr) return damaged(name, "has no format version");
  m.format = format->integer();
  if (m.format != kSnapshotFormat) {
    return damaged(
        name, absl::StrCat("has format version ", m.format,
                           "; this program reads version ", kSnapshotFormat));
  }
  const Json* step = find(*json, "step", &Json::is_integer);
  const Json* files = find(*json, "files", &Json::is_object);
  const Json* tensors = find(*json, "tensors", &Json::is_object);
  if (step == nullptr || files == nullptr || tensors == nullptr) {
    return damaged(name, "lacks step, files or tensors");
  }
  m.step = step->integer();
  m.tensors = *tensors;
  if (const Json* layout = json->find("layout")) m.layout = *layout;
  for (const auto& [file, entry] : files->object()) {
    const Json* bytes = find(entry, "bytes", &Json::is_integer);
    const Json* xxh3 = find(entry, "xxh3", &Json::is_string);
    if (bytes == nullptr || xxh3 == nullptr || !plain(file)) {
      return damaged(name, absl::StrCat("has a wrong entry for ", file));
    }
    m.files.push_back({file, bytes->integer(), xxh3->string()});
  }
  if (manifest_text(m) != text) {
    return damaged(name, "does not have the hash that it states");
  }
  return m;
}

absl::StatusOr<Manifest::File> fingerprint(const std::string& folder,
                                           const std::string& name) {
  ASSIGN_OR_RETURN(const File file, File::open(join_path(folder, name)));
  Hasher hasher;
  std::string buffer;
  for (uint64_t at = 0; at < file.size(); at += buffer.size()) {
    buffer.resize(std::min<uint64_t>(kReadBytes, file.size() - at));
    RETURN_IF_ERROR(file.read_at(at, buffer.data(), buffer.size()));
    hasher.update(buffer.data(), buffer.size());
  }
  return Manifest::File{name, static_cast<int64_t>(file.size()),
                        to_hex(hasher.digest())};
}

absl::StatusOr<Manifest> check_snapshot(const std::string& path, bool hashes) {
  const std::string name = join_path(path, kManifestFile);
  if (!path_exists(name)) {
    return damaged(name, "is missing; the snapshot is incomplete");
  }
  ASSIGN_OR_RETURN(const std::string text, read_file(name));
  ASSIGN_OR_RETURN(Manifest m, parse_manifest(text, name));
  for (const Manifest::File& stated : m.files) {
    const std::string file = join_path(path, stated.name);
    if (!path_exists(file)) return damaged(file, "is missing");
    ASSIGN_OR_RETURN(const File open, File::open(file));
    if (static_cast<int64_t>(open.size()) != stated.bytes) {
      return damaged(file, absl::StrCat("has ", open.size(), " bytes, not the ",
                                        stated.bytes, " of the manifest"));
    }
  }
  if (!hashes) return m;
  for (const Manifest::File& stated : m.files) {
    ASSIGN_OR_RETURN(const Manifest::File found,
                     fingerprint(path, stated.name));
    if (found.xxh3 != stated.xxh3) {
      return damaged(join_path(path, stated.name),
                     "does not have the hash of the manifest");
    }
  }
  return m;
}

}  // namespace tapeline
