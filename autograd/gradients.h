// ParameterGradients: the caller's sums of weight gradients.
//
// One accumulator per (parameter, use site), fp32 (f64 for f64 parameters),
// zero on first use, added to by weight-gradient kernels (beta = 1) in reverse
// program order of each backward. A value: several tapes may add into one, one
// after the other; zero() keeps the memory for the next step.
// Not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "runtime/parameter.h"
#include "runtime/tensor.h"

namespace tapeline {

class ParameterGradients {
 public:
  // What a kernel adds into; valid until the next call.
  const Tensor& accumulator(const Parameter& parameter, int site);
  // The sum over sites in site order; undefined if nothing was ever added since
  // zero(). Folds the other sites into the first, so call it once per step.
  Tensor combined(const Parameter& parameter);
  // Was the parameter reached by a backward since zero()?
  bool reached(const Parameter& parameter) const;
  // Forgets all sums; memory is kept.
  void zero();
  // Called with the key of each trainable parameter that a tape recorded, once
  // in every backward with W parts (so not in backward_inputs): as soon as no
  // node that is still to come adds to it, whoever used it and however often,
  // and whether or not a gradient came.
  using OnReady = std::function<void(const Parameter::State* key)>;
  void set_on_ready(OnReady on_ready) { on_ready_ = std::move(on_ready); }
  const OnReady& on_ready() const { return on_ready_; }

 private:
  struct Site {
    int site;
    Tensor sum;
    bool used = false;
  };
  struct Sums {
    Parameter parameter;  // keeps the key from being reused
    std::vector<Site> sites;
  };
  absl::flat_hash_map<const Parameter::State*, Sums> sums_;
  OnReady on_ready_;
};

// The dtype statistics and weight gradients of `dtype` are kept in.
constexpr DType accumulator_dtype(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

}  // namespace tapeline
