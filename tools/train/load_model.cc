#include "tools/train/load_model.h"

#include <algorithm>
#include <optional>

#include "absl/strings/match.h"
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
  const absl::Status loaded = load((*model)->named_tensors(), dtype, reader);
  if (!loaded.ok()) {
    // transformers drops prediction layers and keeps the key.
    const std::string layer =
        absl::StrCat("model.layers.", (*model)->mtp_layer(0), ".");
    const bool named = absl::StrContains(loaded.message(), layer);
    const auto names = reader.names();
    const bool there = std::any_of(
        names.begin(), names.end(),
        [&](const std::string& name) { return name.starts_with(layer); });
    return absl::Status(
        loaded.code(),
        absl::StrCat(loaded.message(),
                     named && !there ? "; without its prediction layers the "
                                       "model needs num_nextn_predict_layers 0"
                                     : ""));
  }
  // What would change every result if it were ignored.
  for (const std::string& name :
       unknown_tensors((*model)->named_tensors(), (*model)->copies(), reader)) {
    if (name.ends_with("_proj.bias") || name.ends_with("_scale_inv")) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", name, " in ", reader.path(),
                       " has no place in this model; biases of projections "
                       "and FP8 scales cannot be read"));
    }
  }
  RETURN_IF_ERROR(find_copies((*model)->copies(), reader).status());
  (*model)->apply_training_choices();
  return model;
}

absl::StatusOr<DType> weights_dtype(const SafetensorsReader& reader) {
  const TensorInfo* first = nullptr;
  for (const TensorInfo& info : reader.tensors()) {
    if (info.name.ends_with("e_score_correction_bias")) continue;
    const std::optional<DType> dtype = dtype_from_safetensors(info.dtype);
    if (!dtype || !is_float(*dtype)) {
      return absl::InvalidArgumentError(
          absl::StrCat(reader.path(), ": ", info.name, " is ", info.dtype,
                       "; F32, BF16 and F64 can be read"));
    }
    if (first == nullptr) first = &info;
    if (info.dtype != first->dtype) {
      return absl::InvalidArgumentError(absl::StrCat(
          reader.path(), ": ", first->name, " is ", first->dtype, ", but ",
          info.name, " is ", info.dtype, "; give --dtype"));
    }
  }
  if (first == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(reader.path(), " holds no weights"));
  }
  return *dtype_from_safetensors(first->dtype);
}

}  // namespace tapeline
