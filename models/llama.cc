#include "models/llama.h"

namespace tapeline {

absl::StatusOr<GqaLmConfig> parse_llama(const Json& json) {
  return GqaLmConfig::parse_shared(json);
}

}  // namespace tapeline
