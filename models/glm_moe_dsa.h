// GLM-5 and GLM-5.2 (Hugging Face model_type "glm_moe_dsa").
#pragma once

#include "absl/status/statusor.h"
#include "models/mla_lm_config.h"
#include "runtime/json.h"

namespace tapeline {

absl::StatusOr<MlaLmConfig> parse_glm_moe_dsa(const Json& json);

}  // namespace tapeline
