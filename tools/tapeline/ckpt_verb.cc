// tapeline ckpt: what a folder of weights holds, and the same model in another
// folder.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iomanip>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dist/snapshot.h"
#include "runtime/file.h"
#include "runtime/hash.h"
#include "runtime/safetensors.h"
#include "runtime/status.h"
#include "tools/tapeline/verbs.h"
#include "tools/train/companions.h"
#include "tools/train/export.h"
#include "tools/train/load_model.h"

namespace tapeline {
namespace {

// Bytes of a tensor are hashed in pieces of this size.
constexpr uint64_t kPiece = uint64_t{1} << 22;

struct Listed {
  const TensorInfo* info;
  std::string file, xxh3;
};

absl::StatusOr<std::string> hash_of(const SafetensorsReader& reader,
                                    const TensorInfo& info) {
  Hasher hasher;
  std::vector<std::byte> piece(std::min(info.bytes, kPiece));
  for (uint64_t at = 0; at < info.bytes; at += kPiece) {
    const size_t n = std::min(kPiece, info.bytes - at);
    RETURN_IF_ERROR(reader.read_range(info.name, at, piece.data(), n));
    hasher.update(piece.data(), n);
  }
  return to_hex(hasher.digest());
}

// A snapshot is verified whole before anything is printed.
absl::StatusOr<SafetensorsReader> open_weights(const std::string& path) {
  if (path_exists(join_path(path, "MANIFEST.json"))) {
    absl::StatusOr<Snapshot> snapshot = load_snapshot(path);
    if (!snapshot.ok()) return ending(kExitSnapshot, snapshot.status());
    return std::move(*snapshot->tensors);
  }
  return SafetensorsReader::open(path);
}

int inspect(const std::string& path, bool as_json) {
  const absl::StatusOr<SafetensorsReader> reader =
      open_weights(user_path(path));
  if (!reader.ok()) return fail(exit_code(reader.status()), reader.status());
  std::vector<Listed> tensors;
  for (const TensorInfo& info : reader->tensors()) {
    const absl::StatusOr<std::string> hash = hash_of(*reader, info);
    if (!hash.ok()) return fail(kExitBadInput, hash.status());
    const std::string& file = reader->file(info);
    tensors.push_back({&info, file.substr(file.rfind('/') + 1), *hash});
  }
  if (as_json) {
    Json out;
    out["schema"] = 1;
    Json::Array list;
    for (const Listed& t : tensors) {
      Json item;
      item["name"] = t.info->name;
      item["dtype"] = t.info->dtype;
      Json::Array shape;
      for (const int64_t n : t.info->shape) shape.emplace_back(n);
      item["shape"] = std::move(shape);
      item["file"] = t.file;
      item["xxh3"] = t.xxh3;
      list.push_back(std::move(item));
    }
    out["tensors"] = std::move(list);
    out["total_bytes"] = reader->total_bytes();
    std::cout << out.dump() << "\n";
    return end_output();
  }
  for (const Listed& t : tensors) {
    std::cout << t.xxh3 << "  " << std::left << std::setw(4) << t.info->dtype
              << "  [" << absl::StrJoin(t.info->shape, ", ") << "]  "
              << t.info->name << "  " << t.file << "\n";
  }
  std::cout << tensors.size() << " tensors, " << reader->total_bytes()
            << " bytes\n";
  return end_output();
}

absl::Status export_folder(const std::string& from, std::string to,
                           const std::string& dtype) {
  while (to.size() > 1 && to.ends_with('/')) to.pop_back();
  if (path_exists(to)) {
    return absl::AlreadyExistsError(
        absl::StrCat(to, " exists; give a folder that does not"));
  }
  ASSIGN_OR_RETURN(const SafetensorsReader reader,
                   SafetensorsReader::open(from));
  DType kept = dtype == "bf16" ? DType::kBf16 : DType::kF32;
  if (dtype.empty()) {
    ASSIGN_OR_RETURN(kept, weights_dtype(reader));
  }
  ASSIGN_OR_RETURN(const auto model, load_language_model(from, {}, kept));
  ASSIGN_OR_RETURN(const Companions companions,
                   read_companions(from, *model, reader));
  if (!companions.dropped.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        from, " holds ", companions.dropped.size(),
        " tensors that are not part of the model its config.json describes, ",
        "first ", companions.dropped[0], "; nothing was written"));
  }
  return ending(kExitDisk, export_hugging_face(to, model->named_tensors(),
                                               model->config(), companions));
}

}  // namespace

int ckpt_verb(const Arguments& arguments) {
  std::vector<std::string> words;
  std::string dtype;
  bool json = false;
  Flags flags("ckpt");
  flags.set_positions(&words, "inspect DIR | export DIR TO");
  flags.add("json", &json, "", "inspect: print the list as JSON");
  flags.add("dtype", &dtype, "f32|bf16", "export: of weights (the folder's)");
  const absl::StatusOr<bool> parsed = parse_or_help(flags, arguments);
  if (!parsed.ok()) return fail(kExitUsage, parsed.status());
  if (!*parsed) return end_output();
  if (words.size() == 2 && words[0] == "inspect") {
    if (!dtype.empty()) {
      return fail(kExitUsage, "ckpt inspect takes no --dtype");
    }
    return inspect(words[1], json);
  }
  if (words.size() == 3 && words[0] == "export" && !words[2].empty()) {
    if (json) return fail(kExitUsage, "ckpt export prints no JSON");
    if (!dtype.empty() && dtype != "f32" && dtype != "bf16") {
      return fail(kExitUsage,
                  absl::StrCat("--dtype is '", dtype, "'; use f32 or bf16"));
    }
    const absl::Status status =
        export_folder(user_path(words[1]), user_path(words[2]), dtype);
    return status.ok() ? end_output() : fail(exit_code(status), status);
  }
  return fail(kExitUsage,
              "give a folder: tapeline ckpt inspect DIR, or two: tapeline ckpt "
              "export DIR TO");
}

}  // namespace tapeline
