// A model as a Hugging Face folder: config.json, model.safetensors or shards
// with their index, and what the folder it came from held besides.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "models/weights.h"
#include "runtime/json.h"
#include "runtime/safetensors.h"
#include "tools/train/companions.h"
#include "tools/train/host_tensors.h"

namespace tapeline {

inline constexpr uint64_t kShardBytes = uint64_t{5} << 30;

// The folder appears complete or not at all; one that is there is replaced
// afterwards. `config` is written with every key and dtype = the tensors'.
absl::Status export_hugging_face(const std::string& folder,
                                 const std::vector<NamedTensor>& tensors,
                                 Json config, const Companions& companions,
                                 uint64_t max_shard_bytes = kShardBytes);

// --- Its parts, for ranks that each have some of the tensors.
// Tensors and what files repeat of them.
void add_with_copies(const std::vector<NamedTensor>& tensors,
                     const Companions& companions, HostTensors& host);
// In the order given, at most so many bytes each but for larger tensors.
std::vector<std::vector<NamedBytes>> cut_shards(
    const std::vector<NamedBytes>& tensors, uint64_t max_shard_bytes);
// model-00002-of-00004.safetensors; model.safetensors if it is the only one.
std::string shard_name(size_t shard, size_t shards);
// The index of shards that are there: of each rank a JSON object of its files,
// and in each the bytes of its tensors. None if there is one file.
absl::Status write_shard_index(const std::string& folder,
                               const std::vector<std::string>& ranks,
                               size_t shards);
// config.json and the companions' files.
absl::Status write_companions(const std::string& folder, Json config,
                              DType dtype, const Companions& companions);
// Renames `temporary` to `folder`; what was there goes afterwards. After an
// error what was there is there again.
absl::Status replace_folder(const std::string& temporary,
                            const std::string& folder);

}  // namespace tapeline
