#include "tools/train/load_model.h"

#include "absl/strings/str_cat.h"
#include "runtime/file.h"
#include "runtime/safetensors.h"
#include "runtime/status.h"

namespace tapeline {

absl::StatusOr<std::unique_ptr<LanguageModel>> load_language_model(
    const std::string& folder, const ModelChoices& choices, DType dtype) {
  if (!is_directory(folder)) {
    return absl::NotFoundError(
        absl::StrCat(folder,
                     " is no folder; give one with config.json and "
                     "model.safetensors"));
  }
  const std::string config = join_path(folder, "config.json");
  ASSIGN_OR_RETURN(const Json json, read_json(config));
  absl::StatusOr<std::unique_ptr<LanguageModel>> model =
      make_language_model(json, choices);
  if (!model.ok()) {
    return absl::Status(model.status().code(),
                        absl::StrCat(config, ": ", model.status().message()));
  }
  ASSIGN_OR_RETURN(const SafetensorsReader reader,
                   SafetensorsReader::open(folder));
  RETURN_IF_ERROR(load((*model)->named_tensors(), dtype, reader));
  (*model)->apply_training_choices();
  return model;
}

}  // namespace tapeline
