// Named tensors in safetensors files: one file, or shards with an index.
//
// The reader checks every header and index when it opens (the rules are in
// safetensors_header.h), reads by pread and converts nothing. The writer's
// files appear complete or not at all (file.h), carry {"format": "pt"}, which
// other readers insist on, and keep every tensor aligned to its element.
// A reader may be used by several threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/dtype.h"
#include "runtime/file.h"
#include "runtime/safetensors_header.h"
#include "runtime/shape.h"
#include "runtime/tensor.h"

namespace tapeline {

class SafetensorsReader {
 public:
  // `path` is a .safetensors file, an index .json, or a folder that holds
  // model.safetensors or model.safetensors.index.json (both: an error).
  // With an index, shards hold exactly the tensors that it says, each once.
  static absl::StatusOr<SafetensorsReader> open(const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<TensorInfo>& tensors() const {
    return tensors_;
  }  // by name
  std::vector<std::string> names() const;
  const TensorInfo* find(std::string_view name) const;  // null: absent
  // find(), or NotFound with the nearest name.
  absl::StatusOr<const TensorInfo*> require(std::string_view name) const;
  const std::string& file(const TensorInfo& tensor) const {
    return files_[static_cast<size_t>(tensor.shard)].path();
  }
  // Of the file, or of the first shard.
  const std::map<std::string, std::string>& metadata() const {
    return metadata_;
  }
  uint64_t total_bytes() const { return total_bytes_; }

  // All bytes of the tensor; `bytes` must be their number.
  absl::Status read(std::string_view name, std::byte* to, size_t bytes) const;
  // `bytes` bytes from `first` on, counted from the tensor's first byte.
  absl::Status read_range(std::string_view name, uint64_t first, std::byte* to,
                          size_t bytes) const;
  // On the current device. F32, BF16, F64, I32, I64 and U8 of rank <= 4.
  absl::StatusOr<Tensor> read_tensor(std::string_view name,
                                     Tag tag = Tag::kOther) const;

 private:
  SafetensorsReader() = default;
  absl::StatusOr<SafetensorsHeader> add_file(const std::string& path);
  absl::Status open_shards(const std::string& index_path);
  absl::Status finish();

  std::string path_;
  std::vector<File> files_;
  std::vector<TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
  uint64_t total_bytes_ = 0;
};

// A tensor to write: contiguous bytes in host memory, owned by the caller.
struct NamedBytes {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  const std::byte* data = nullptr;

  uint64_t bytes() const {
    return static_cast<uint64_t>(shape.elements()) * size_of(dtype);
  }
};

// One file. Data is ordered by element size, largest first, then by name.
// Repeated names are a CHECK.
absl::Status write_safetensors(
    const std::string& path, std::span<const NamedBytes> tensors,
    const std::map<std::string, std::string>& metadata = {});

// model.safetensors, or model-0000k-of-0000n.safetensors of at most
// max_shard_bytes of data each (a larger tensor has a shard of its own), filled
// in the order given, then model.safetensors.index.json. `folder` is created;
// a folder that holds an export of another form is refused.
absl::Status write_safetensors_shards(
    const std::string& folder, std::span<const NamedBytes> tensors,
    uint64_t max_shard_bytes,
    const std::map<std::string, std::string>& metadata = {});

}  // namespace tapeline
