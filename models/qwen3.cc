#include "models/qwen3.h"

#include "runtime/status.h"

namespace tapeline {

absl::StatusOr<GqaLmConfig> parse_qwen3(const Json& json) {
  ASSIGN_OR_RETURN(GqaLmConfig c, GqaLmConfig::parse_shared(json));
  c.attention.qk_norm = true;
  return c;
}

}  // namespace tapeline
