// What was read comes back the same from the text written for it, whole and in
// order.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "dist/pipeline/layout.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto layout = tapeline::parse_layout(text, "fuzz");
  if (!layout.ok()) return 0;
  const auto again =
      tapeline::parse_layout(tapeline::layout_text(*layout), "again");
  if (!again.ok() || *again != *layout) std::abort();
  int layers = 0;
  for (const tapeline::StageParts& stage : *layout) {
    if (stage.first_layer != layers) std::abort();
    layers += stage.layers;
  }
  return 0;
}
