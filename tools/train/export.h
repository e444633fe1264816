// A model as a Hugging Face folder: config.json, model.safetensors or shards
// with their index, and what the folder it came from held besides.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "models/weights.h"
#include "runtime/json.h"
#include "tools/train/companions.h"

namespace tapeline {

inline constexpr uint64_t kShardBytes = uint64_t{5} << 30;

// The folder appears complete or not at all; one that is there is replaced
// afterwards. `config` is written with every key and dtype = the tensors'.
absl::Status export_hugging_face(const std::string& folder,
                                 const std::vector<NamedTensor>& tensors,
                                 Json config, const Companions& companions,
                                 uint64_t max_shard_bytes = kShardBytes);

}  // namespace tapeline
