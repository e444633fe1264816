#include "tools/train/load_model.h"

#include <optional>

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
  RETURN_IF_ERROR(find_copies((*model)->copies(), reader).status());
  (*model)->apply_training_choices();
  return model;
}

absl::StatusOr<DType> weights_dtype(const SafetensorsReader& reader) {
  ASSIGN_OR_RETURN(const TensorInfo* embed,
                   reader.require("model.embed_tokens.weight"));
  const std::optional<DType> dtype = dtype_from_safetensors(embed->dtype);
  if (!dtype || !is_float(*dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat(reader.path(), ": ", embed->name, " is ", embed->dtype,
                     "; F32, BF16 and F64 can be read"));
  }
  return *dtype;
}

}  // namespace tapeline
