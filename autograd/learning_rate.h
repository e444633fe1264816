// Learning rates: pure functions of the step.
//
//   s <= warmup_steps        lr s / warmup_steps
//   constant                 lr
//   linear                   lr + (min_lr - lr) p
//   cosine                   min_lr + (lr - min_lr) (1 + cos(pi p)) / 2
//   wsd                      lr, then linear to min_lr over decay_steps
//
// Steps count from 1, so that no step has rate 0 and the last has min_lr;
// p = (s - warmup_steps) / (total_steps - warmup_steps). A step past the end
// keeps the last rate. Sources: cosine arXiv 1608.03983; warm-up, stable, decay
// (wsd) arXiv 2404.06395. Thread-safe.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"

namespace tapeline {

struct LearningRate {
  enum class Kind : uint8_t { kConstant, kLinear, kCosine, kWsd };
  Kind kind = Kind::kConstant;
  double lr = 0;
  double min_lr = 0;  // constant ignores it
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;  // constant ignores it
  int64_t decay_steps = 0;  // wsd: of the total

  double at(int64_t step) const;
  // Says which fields contradict each other.
  absl::Status check() const;
};

std::string_view name_of(LearningRate::Kind kind);

}  // namespace tapeline
