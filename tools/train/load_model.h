// A model read from a Hugging Face folder.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "runtime/safetensors.h"
#include "tools/train/language_model.h"

namespace tapeline {

// config.json and model.safetensors, or shards with an index, of `folder`, as
// `dtype` (buffers are fp32). A missing file, another shape or a value that is
// not finite is an error that names file and tensor.
absl::StatusOr<std::unique_ptr<LanguageModel>> load_language_model(
    const std::string& folder, const ModelChoices& choices,
    DType dtype = DType::kF32);

// The one dtype of a folder's weights; buffers, which are fp32, do not count.
absl::StatusOr<DType> weights_dtype(const SafetensorsReader& reader);

}  // namespace tapeline
