// What a Hugging Face folder holds besides the tensors of the model and its
// config.json, and an export of that model has to hold too.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/weights.h"
#include "runtime/safetensors.h"
#include "tools/train/language_model.h"

namespace tapeline {

struct Companions {
  // generation_config.json, tokenizer and chat template files, by name: bytes
  // as they are.
  std::map<std::string, std::string> files;
  // Tensors that the weights repeat.
  std::vector<TensorCopy> copies;
  // Tensors of the folder that are not the model's: an export lacks them.
  std::vector<std::string> dropped;
};

absl::StatusOr<Companions> read_companions(const std::string& folder,
                                           LanguageModel& model,
                                           const SafetensorsReader& reader);

}  // namespace tapeline
