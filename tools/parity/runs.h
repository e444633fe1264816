// What a model computes on a golden's batch, by the golden's names.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/dtype.h"
#include "tools/parity/golden.h"
#include "tools/parity/values.h"

namespace tapeline {

struct Computed {
  NamedValues values;
  // Gradients that are not zero, of tensors the golden has no gradient of.
  std::vector<std::string> extra_gradients;
  // Rows of key ids taken from the golden because their scores tie.
  int64_t rows_tied = 0;
};

struct ComputeOptions {
  std::string model;  // Hugging Face folder
  DType dtype = DType::kF32;
  bool absorbed = false;  // form of latent attention; others ignore it
  // Keys and experts to use instead of the model's own choice, of main and MTP
  // goldens; null: none.
  const NamedValues* choices = nullptr;
};
absl::StatusOr<Computed> compute(const Golden& golden,
                                 const ComputeOptions& options);

}  // namespace tapeline
