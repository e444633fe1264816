// Llama 2 and 3: grouped-query attention, no query or key norms.
#pragma once

#include "absl/status/statusor.h"
#include "models/gqa_lm.h"

namespace tapeline {

absl::StatusOr<GqaLmConfig> parse_llama(const Json& json);

}  // namespace tapeline
