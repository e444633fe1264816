// Each value read must come back the same from the text that we write for it.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "runtime/toml.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto entries = tapeline::parse_toml(text, "fuzz");
  if (!entries.ok()) return 0;
  for (const tapeline::TomlEntry& entry : *entries) {
    if (entry.table) continue;
    const std::string line = tapeline::toml_key(entry.path) + " = " +
                             tapeline::toml_value(entry.value);
    const auto again = tapeline::parse_toml(line, "again");
    // Compared as text: NaN differs from itself.
    if (!again.ok()) std::abort();
    if (entry.value.is_object()) continue;  // flattened when read again
    if (again->size() != 1 || tapeline::toml_value((*again)[0].value) !=
                                  tapeline::toml_value(entry.value)) {
      std::abort();
    }
  }
  return 0;
}
