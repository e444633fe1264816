#include "runtime/safetensors.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "runtime/access.h"
#include "runtime/edit_distance.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

constexpr char kSingle[] = "model.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";

absl::Status invalid(std::string text) {
  return absl::InvalidArgumentError(std::move(text));
}

std::string shape_text(const TensorInfo& tensor) {
  std::string out = tensor.dtype + "[";
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    out += (i > 0 ? ", " : "") + std::to_string(tensor.shape[i]);
  }
  return out + "]";
}

}  // namespace

absl::StatusOr<SafetensorsReader> SafetensorsReader::open(
    const std::string& path) {
  SafetensorsReader reader;
  reader.path_ = path;
  std::string file = path;
  if (is_directory(path)) {
    const bool single = path_exists(join_path(path, kSingle));
    const bool index = path_exists(join_path(path, kIndex));
    if (single && index) {
      return invalid(path + ": holds both " + kSingle + " and " + kIndex +
                     "; remove the stale one");
    }
    if (!single && !index) {
      return absl::NotFoundError(path + ": holds neither " + kSingle + " nor " +
                                 kIndex);
    }
    file = join_path(path, single ? kSingle : kIndex);
  }
  if (file.ends_with(".json")) {
    RETURN_IF_ERROR(reader.open_shards(file));
  } else {
    ASSIGN_OR_RETURN(SafetensorsHeader header, reader.add_file(file));
    reader.metadata_ = std::move(header.metadata);
  }
  RETURN_IF_ERROR(reader.finish());
  return reader;
}

absl::StatusOr<SafetensorsHeader> SafetensorsReader::add_file(
    const std::string& path) {
  ASSIGN_OR_RETURN(File file, File::open(path));
  std::string first(std::min<uint64_t>(8, file.size()), '\0');
  RETURN_IF_ERROR(file.read_at(0, first.data(), first.size()));
  ASSIGN_OR_RETURN(const uint64_t header_bytes,
                   safetensors_header_bytes(first, file.size(), path));
  std::string text(header_bytes, '\0');
  RETURN_IF_ERROR(file.read_at(8, text.data(), text.size()));
  ASSIGN_OR_RETURN(SafetensorsHeader header,
                   parse_safetensors_header(text, file.size(), path));
  for (TensorInfo& tensor : header.tensors) {
    tensor.shard = static_cast<int>(files_.size());
    tensors_.push_back(tensor);
  }
  files_.push_back(std::move(file));
  return header;
}

absl::Status SafetensorsReader::open_shards(const std::string& index_path) {
  ASSIGN_OR_RETURN(const std::string text, read_file(index_path));
  ASSIGN_OR_RETURN(const SafetensorsIndex index,
                   parse_safetensors_index(text, index_path));
  absl::flat_hash_map<std::string, std::string> owner;
  std::vector<std::string> shards;
  for (const auto& [name, shard] : index.weight_map) {
    owner.emplace(name, shard);
    shards.push_back(shard);
  }
  std::sort(shards.begin(), shards.end());
  shards.erase(std::unique(shards.begin(), shards.end()), shards.end());

  const std::string folder = parent_path(index_path);
  for (const std::string& shard : shards) {
    const bool first = files_.empty();
    ASSIGN_OR_RETURN(SafetensorsHeader header,
                     add_file(join_path(folder, shard)));
    if (first) metadata_ = std::move(header.metadata);
    for (const TensorInfo& tensor : header.tensors) {
      const auto found = owner.find(tensor.name);
      if (found == owner.end() || found->second != shard) {
        return invalid(index_path + ": " + shard + " holds tensor '" +
                       tensor.name + "', which the index " +
                       (found == owner.end() ? "does not know"
                                             : "gives to " + found->second));
      }
    }
  }
  // Every tensor held was expected, so a count that differs is one missing.
  if (tensors_.size() != index.weight_map.size()) {
    for (const TensorInfo& tensor : tensors_) owner.erase(tensor.name);
    const auto missing = std::min_element(owner.begin(), owner.end());
    return invalid(index_path + ": " + missing->second + " lacks tensor '" +
                   missing->first + "'");
  }
  uint64_t total = 0;
  for (const TensorInfo& tensor : tensors_) total += tensor.bytes;
  if (index.total_size && *index.total_size != total) {
    return invalid(index_path + ": total_size is " +
                   std::to_string(*index.total_size) + ", the shards hold " +
                   std::to_string(total) + " bytes");
  }
  return absl::OkStatus();
}

absl::Status SafetensorsReader::finish() {
  std::sort(
      tensors_.begin(), tensors_.end(),
      [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  for (const TensorInfo& tensor : tensors_) total_bytes_ += tensor.bytes;
  return absl::OkStatus();
}

std::vector<std::string> SafetensorsReader::names() const {
  std::vector<std::string> out;
  for (const TensorInfo& tensor : tensors_) out.push_back(tensor.name);
  return out;
}

const TensorInfo* SafetensorsReader::find(std::string_view name) const {
  const auto found = std::lower_bound(
      tensors_.begin(), tensors_.end(), name,
      [](const TensorInfo& t, std::string_view n) { return t.name < n; });
  return found != tensors_.end() && found->name == name ? &*found : nullptr;
}

absl::StatusOr<const TensorInfo*> SafetensorsReader::require(
    std::string_view name) const {
  const TensorInfo* found = find(name);
  if (found != nullptr) return found;
  return absl::NotFoundError(path_ + ": no tensor '" + std::string(name) + "'" +
                             suggestion(name, names()));
}

absl::Status SafetensorsReader::read(std::string_view name, std::byte* to,
                                     size_t bytes) const {
  ASSIGN_OR_RETURN(const TensorInfo* tensor, require(name));
  if (tensor->bytes != bytes) {
    return invalid(file(*tensor) + ": tensor '" + tensor->name + "' is " +
                   shape_text(*tensor) + ", " + std::to_string(tensor->bytes) +
                   " bytes; " + std::to_string(bytes) + " were asked for");
  }
  return read_range(name, 0, to, bytes);
}

absl::Status SafetensorsReader::read_range(std::string_view name,
                                           uint64_t first, std::byte* to,
                                           size_t bytes) const {
  ASSIGN_OR_RETURN(const TensorInfo* tensor, require(name));
  if (first > tensor->bytes || bytes > tensor->bytes - first) {
    return invalid(file(*tensor) + ": tensor '" + tensor->name + "' is " +
                   shape_text(*tensor) + "; bytes " + std::to_string(first) +
                   " to " + std::to_string(first + bytes) +
                   " are not within it");
  }
  return files_[static_cast<size_t>(tensor->shard)].read_at(
      tensor->offset + first, to, bytes);
}

absl::StatusOr<Tensor> SafetensorsReader::read_tensor(std::string_view name,
                                                      Tag tag) const {
  ASSIGN_OR_RETURN(const TensorInfo* info, require(name));
  const std::optional<DType> dtype = dtype_from_safetensors(info->dtype);
  if (!dtype) {
    return invalid(file(*info) + ": tensor '" + info->name + "' is " +
                   shape_text(*info) +
                   "; readable are F32, BF16, F64, I32, I64 and U8");
  }
  if (info->shape.size() > static_cast<size_t>(Shape::kMaxRank)) {
    return invalid(file(*info) + ": tensor '" + info->name + "' is " +
                   shape_text(*info) + "; tensors have at most " +
                   std::to_string(Shape::kMaxRank) + " dimensions");
  }
  Shape shape;
  for (int64_t extent : info->shape) shape.push_back(extent);
  const Tensor tensor = Tensor::empty(shape, *dtype, tag);
  absl::Status status;
  dispatch(*dtype, [&]<class T>() {
    std::vector<T> values(static_cast<size_t>(shape.elements()));
    status =
        read(name, reinterpret_cast<std::byte*>(values.data()), info->bytes);
    tensor.assign(values);
  });
  RETURN_IF_ERROR(status);
  return tensor;
}

}  // namespace tapeline
