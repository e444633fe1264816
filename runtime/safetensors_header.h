// The safetensors container: what its bytes say, checked before use.
//
//   u64 little-endian N | N bytes of JSON | tensor data
//   {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...,
//    "__metadata__": {"key": "text", ...}}
//
// Nothing read is trusted. Refused are: a file under 8 bytes; N over 100 MB or
// past the end; a header that does not begin with '{', is not UTF-8, nests
// beyond 3 levels, repeats a key, has an unknown or missing field or a dtype we
// have not heard of; numbers that are not plain integers; negative, overflowing
// or mismatched sizes; data that the tensors do not tile exactly, without hole,
// overlap or rest.
// Format: https://github.com/huggingface/safetensors (Format section).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/dtype.h"

namespace tapeline {

inline constexpr uint64_t kSafetensorsMaxHeader = 100'000'000;

struct TensorInfo {
  std::string name;
  std::string dtype;  // as the format spells it: "BF16"
  std::vector<int64_t> shape;
  uint64_t offset = 0;  // of the first byte, within the file
  uint64_t bytes = 0;
  int shard = 0;  // which file (SafetensorsReader::file)
};

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // in the order of their bytes
  std::map<std::string, std::string> metadata;
};

// Bits of an element of a known dtype; nothing for an unknown one.
std::optional<int> safetensors_bits(std::string_view dtype);
// "BF16" <-> kBf16; nothing where we compute with no such type.
std::optional<DType> dtype_from_safetensors(std::string_view dtype);
std::string_view to_safetensors(DType dtype);

// N, from the first min(8, file_bytes) bytes of the file. `name` stands for
// the file in errors.
absl::StatusOr<uint64_t> safetensors_header_bytes(std::string_view first,
                                                  uint64_t file_bytes,
                                                  std::string_view name);
// `header` is the N bytes of JSON.
absl::StatusOr<SafetensorsHeader> parse_safetensors_header(
    std::string_view header, uint64_t file_bytes, std::string_view name);

// model.safetensors.index.json: which file of the folder holds each tensor.
struct SafetensorsIndex {
  std::vector<std::pair<std::string, std::string>> weight_map;  // name, file
  std::optional<uint64_t> total_size;  // bytes of all tensors
};
// File names that are not plain names in the same folder are refused.
absl::StatusOr<SafetensorsIndex> parse_safetensors_index(std::string_view text,
                                                         std::string_view name);

}  // namespace tapeline
