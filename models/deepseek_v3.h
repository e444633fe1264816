// DeepSeek-V3 (Hugging Face model_type "deepseek_v3"); as "deepseek_v32", or
// with index_topk in its config.json, with the sparse attention of
// DeepSeek-V3.2, whose indexer rotates (j, j + R/2) pairs where the main
// attention rotates (2j, 2j+1).
#pragma once

#include "absl/status/statusor.h"
#include "models/mla_lm_config.h"
#include "runtime/json.h"

namespace tapeline {

absl::StatusOr<MlaLmConfig> parse_deepseek_v3(const Json& json);

}  // namespace tapeline
