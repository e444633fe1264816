#include "autograd/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "absl/strings/str_cat.h"

namespace tapeline {

double LearningRate::at(int64_t step) const {
  if (step < warmup_steps) {
    return lr * static_cast<double>(step) / static_cast<double>(warmup_steps);
  }
  if (kind == Kind::kConstant) return lr;
  const int64_t decay =
      kind == Kind::kWsd ? decay_steps : total_steps - warmup_steps;
  const int64_t into = std::min(step, total_steps) - (total_steps - decay);
  if (into <= 0 || decay <= 0) return lr;
  const double p = static_cast<double>(into) / static_cast<double>(decay);
  if (kind == Kind::kCosine) {
    return min_lr + (lr - min_lr) * (1 + std::cos(std::numbers::pi * p)) / 2;
  }
  return lr + (min_lr - lr) * p;
}

absl::Status LearningRate::check() const {
  const auto error = [](auto... parts) {
    return absl::InvalidArgumentError(
        absl::StrCat("learning rate: ", parts...));
  };
  if (!(lr > 0) || !std::isfinite(lr)) {
    return error("lr is ", lr, "; it must be above 0");
  }
  if (!(min_lr >= 0) || min_lr > lr) {
    return error("min_lr is ", min_lr, "; it must be between 0 and lr = ", lr);
  }
  if (warmup_steps < 0 || decay_steps < 0) {
    return error("warm-up and decay steps cannot be negative");
  }
  // A warm-up longer than the run is a short trial of a longer one.
  if (kind == Kind::kWsd && warmup_steps + decay_steps > total_steps) {
    return error("warm-up and decay take ", warmup_steps + decay_steps,
                 " steps, but the run has ", total_steps);
  }
  return absl::OkStatus();
}

std::string_view name_of(LearningRate::Kind kind) {
  switch (kind) {
    case LearningRate::Kind::kConstant:
      return "constant";
    case LearningRate::Kind::kLinear:
      return "linear";
    case LearningRate::Kind::kCosine:
      return "cosine";
    case LearningRate::Kind::kWsd:
      return "wsd";
  }
  return "?";
}

}  // namespace tapeline
