// What was read comes back the same from the text written for it, and anything
// that was read can be validated; what is valid can be timed and drawn.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "dist/pipeline/draw.h"
#include "dist/pipeline/simulator.h"
#include "dist/pipeline/text.h"
#include "dist/pipeline/validator.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto s = tapeline::parse_any_schedule(text, "fuzz");
  if (!s.ok()) return 0;
  const auto again =
      tapeline::parse_schedule(tapeline::schedule_text(*s), "again");
  if (!again.ok() || *again != *s) std::abort();
  const tapeline::OvRelease early = tapeline::OvRelease::kEarly;
  if (const auto refusal = tapeline::validate(*s, {.ov_release = early})) {
    if (refusal->message.empty()) std::abort();
    if (!tapeline::validate(*s)) std::abort();
    return 0;
  }
  const auto simulation = tapeline::simulate(*s, {.ov_release = early});
  if (!simulation.ok() || simulation->bubble > 1) std::abort();
  tapeline::ascii_timeline(*s, *simulation);
  tapeline::svg_timeline(*s, *simulation);
  // A schedule whose stages all have actions survives the other form too.
  if (s->groups.empty()) {
    const auto csv =
        tapeline::parse_schedule_csv(tapeline::schedule_csv(*s), "csv");
    if (csv.ok() && csv->placement != s->placement) std::abort();
  }
  return 0;
}
