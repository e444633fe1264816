// The writing half of safetensors.h.

#include <algorithm>
#include <cstdio>

#include "runtime/check.h"
#include "runtime/json.h"
#include "runtime/safetensors.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

using Order = std::vector<const NamedBytes*>;

Order in_file_order(std::span<const NamedBytes> tensors) {
  Order order;
  for (const NamedBytes& tensor : tensors) order.push_back(&tensor);
  // Every size divides the ones before it, so each tensor is aligned to its
  // element as long as the data begins at a multiple of 8.
  std::sort(
      order.begin(), order.end(), [](const NamedBytes* a, const NamedBytes* b) {
        const size_t size_a = size_of(a->dtype), size_b = size_of(b->dtype);
        return size_a != size_b ? size_a > size_b : a->name < b->name;
      });
  return order;
}

void check_names(std::span<const NamedBytes> tensors) {
  std::vector<std::string_view> names;
  for (const NamedBytes& tensor : tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  for (size_t i = 0; i < names.size(); ++i) {
    CHECK(names[i] != "__metadata__") << "[safetensors] name of a tensor";
    CHECK(i == 0 || names[i] != names[i - 1])
        << "[safetensors] two tensors are named '" << names[i] << "'";
  }
}

std::string header_of(const Order& order,
                      const std::map<std::string, std::string>& metadata) {
  Json header;
  Json& meta = header["__metadata__"];
  meta["format"] = "pt";
  for (const auto& [key, value] : metadata) meta[key] = value;
  Json::Object& members = header.object();
  uint64_t at = 0;
  for (const NamedBytes* tensor : order) {
    Json::Array shape;
    for (int64_t extent : tensor->shape) shape.emplace_back(extent);
    Json entry;
    entry["dtype"] = to_safetensors(tensor->dtype);
    entry["shape"] = std::move(shape);
    entry["data_offsets"] = Json::Array{at, at + tensor->bytes()};
    // Names are known to differ; looking each up would be quadratic.
    members.emplace_back(tensor->name, std::move(entry));
    at += tensor->bytes();
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  return text;
}

std::string shard_name(size_t k, size_t n) {
  char name[64];
  std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", k, n);
  return name;
}

std::vector<std::span<const NamedBytes>> cut(
    std::span<const NamedBytes> tensors, uint64_t max_bytes) {
  std::vector<std::span<const NamedBytes>> shards;
  size_t first = 0;
  uint64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const uint64_t more = tensors[i].bytes();
    if (i > first && bytes + more > max_bytes) {
      shards.push_back(tensors.subspan(first, i - first));
      first = i;
      bytes = 0;
    }
    bytes += more;
  }
  shards.push_back(tensors.subspan(first));
  return shards;
}

// Files of an earlier export that this one would not replace would be read
// together with it, or instead of it.
absl::Status check_leftovers(const std::string& folder,
                             const std::vector<std::string>& ours) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names,
                   list_directory(folder));
  for (const std::string& name : names) {
    const bool weights = name.starts_with("model") &&
                         (name.ends_with(".safetensors") ||
                          name.ends_with(".safetensors.index.json"));
    if (weights && std::find(ours.begin(), ours.end(), name) == ours.end()) {
      return absl::FailedPreconditionError(
          join_path(folder, name) +
          ": left from another export; write to an empty folder");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status write_safetensors(
    const std::string& path, std::span<const NamedBytes> tensors,
    const std::map<std::string, std::string>& metadata) {
  check_names(tensors);
  const Order order = in_file_order(tensors);
  const std::string header = header_of(order, metadata);
  if (header.size() > kSafetensorsMaxHeader) {
    return absl::InvalidArgumentError(
        path + ": " + std::to_string(tensors.size()) +
        " tensors need a header above 100 MB; write shards");
  }
  char length[8];
  for (int i = 0; i < 8; ++i) {
    length[i] = static_cast<char>(uint64_t{header.size()} >> (8 * i));
  }
  ASSIGN_OR_RETURN(FileWriter writer, FileWriter::create(path));
  RETURN_IF_ERROR(writer.append(length, sizeof(length)));
  RETURN_IF_ERROR(writer.append(header));
  for (const NamedBytes* tensor : order) {
    RETURN_IF_ERROR(writer.append(tensor->data, tensor->bytes()));
  }
  return writer.commit();
}

absl::Status write_safetensors_shards(
    const std::string& folder, std::span<const NamedBytes> tensors,
    uint64_t max_shard_bytes,
    const std::map<std::string, std::string>& metadata) {
  check_names(tensors);
  RETURN_IF_ERROR(make_directories(folder));
  const auto shards = cut(tensors, max_shard_bytes);
  if (shards.size() == 1) {
    RETURN_IF_ERROR(check_leftovers(folder, {"model.safetensors"}));
    return write_safetensors(join_path(folder, "model.safetensors"), tensors,
                             metadata);
  }
  const std::string index_name = "model.safetensors.index.json";
  std::vector<std::string> names;
  for (size_t k = 1; k <= shards.size(); ++k) {
    names.push_back(shard_name(k, shards.size()));
  }
  names.push_back(index_name);
  RETURN_IF_ERROR(check_leftovers(folder, names));

  Json::Object weight_map;
  uint64_t total = 0;
  for (size_t k = 0; k < shards.size(); ++k) {
    RETURN_IF_ERROR(
        write_safetensors(join_path(folder, names[k]), shards[k], metadata));
    for (const NamedBytes& tensor : shards[k]) {
      weight_map.emplace_back(tensor.name, names[k]);
      total += tensor.bytes();
    }
  }
  std::sort(weight_map.begin(), weight_map.end(),
            [](const Json::Member& a, const Json::Member& b) {
              return a.first < b.first;
            });
  Json index;
  index["metadata"]["total_size"] = total;
  index["weight_map"] = std::move(weight_map);
  return write_json(join_path(folder, index_name), index);
}

}  // namespace tapeline
