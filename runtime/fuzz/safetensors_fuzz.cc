// The bytes of a whole file: length, header and data.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "runtime/safetensors_header.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto length =
      tapeline::safetensors_header_bytes(bytes.substr(0, 8), size, "fuzz");
  if (!length.ok()) return 0;
  const auto header = tapeline::parse_safetensors_header(
      bytes.substr(8, *length), size, "fuzz");
  if (!header.ok()) return 0;
  // What an accepted header promises.
  uint64_t at = 8 + *length;
  for (const tapeline::TensorInfo& tensor : header->tensors) {
    uint64_t elements = 1;
    for (int64_t extent : tensor.shape) {
      if (extent < 0) std::abort();
      elements *= static_cast<uint64_t>(extent);
    }
    const auto bits = tapeline::safetensors_bits(tensor.dtype);
    if (!bits || elements * static_cast<uint64_t>(*bits) / 8 != tensor.bytes ||
        tensor.offset != at) {
      std::abort();
    }
    at += tensor.bytes;
  }
  if (at != size) std::abort();
  return 0;
}
