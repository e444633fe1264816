// What is read must come back the same when it is written and read again.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "runtime/json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto value = tapeline::parse_json(text, "fuzz");
  if (!value.ok()) return 0;
  for (int indent : {-1, 2}) {
    const auto again = tapeline::parse_json(value->dump(indent), "again");
    if (!again.ok() || !(*again == *value)) std::abort();
  }
  return 0;
}
