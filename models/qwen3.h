// Qwen3, dense: grouped-query attention with query and key norms.
#pragma once

#include "absl/status/statusor.h"
#include "models/gqa_lm.h"

namespace tapeline {

absl::StatusOr<GqaLmConfig> parse_qwen3(const Json& json);

}  // namespace tapeline
