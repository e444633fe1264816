// Qwen3-MoE: Qwen3 with experts chosen by softmax, without shared experts.
#pragma once

#include "absl/status/statusor.h"
#include "models/gqa_lm.h"

namespace tapeline {

absl::StatusOr<GqaLmConfig> parse_qwen3_moe(const Json& json);

}  // namespace tapeline
