#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "runtime/safetensors_header.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto index = tapeline::parse_safetensors_index(text, "fuzz");
  if (!index.ok()) return 0;
  for (const auto& [name, file] : index->weight_map) {
    if (file.find('/') != std::string::npos) std::abort();
  }
  return 0;
}
