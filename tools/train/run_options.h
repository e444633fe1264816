// What the settings of a config file ask of trainer and model.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/json.h"
#include "tools/config/config.h"
#include "tools/train/language_model.h"
#include "tools/train/trainer.h"

namespace tapeline {

// Settings that contradict each other, or that nothing here can do yet: an
// error that names the keys.
absl::Status check_settings(const Config& config);

DType compute_dtype(const Config& config);
TrainerOptions trainer_options(const Config& config);
// Which of `layers` layers, MTP ones included, are recomputed; an error where a
// policy that recomputes reaches none.
absl::StatusOr<std::vector<bool>> recomputed_layers(const Config& config,
                                                    int layers);
ModelChoices model_choices(const Config& config);
// The keys of [model], over those of model.path/config.json if there is one.
absl::StatusOr<Json> model_config(const Config& config,
                                  const std::string& model_path);

}  // namespace tapeline
