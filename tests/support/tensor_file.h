// A safetensors file in memory, to be changed and written again.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "runtime/check.h"
#include "runtime/safetensors.h"
#include "runtime/status.h"

namespace tapeline {

struct TensorFile {
  std::vector<NamedBytes> tensors;
  std::map<std::string, std::vector<std::byte>> bytes;
  std::map<std::string, std::string> metadata;
};

inline TensorFile read_tensor_file(const std::string& path) {
  const absl::StatusOr<SafetensorsReader> reader =
      SafetensorsReader::open(path);
  CHECK(reader.ok()) << reader.status().message();
  TensorFile file;
  file.metadata = reader->metadata();
  for (const TensorInfo& info : reader->tensors()) {
    std::vector<std::byte>& bytes = file.bytes[info.name];
    bytes.resize(info.bytes);
    CHECK_OK(reader->read(info.name, bytes.data(), bytes.size()));
    Shape shape;
    for (const int64_t n : info.shape) shape.push_back(n);
    file.tensors.push_back(
        {info.name, *dtype_from_safetensors(info.dtype), shape, bytes.data()});
  }
  return file;
}

}  // namespace tapeline
