// Comparing values with a golden's.
//
//   error = |a - b| / |b|, 2-norms over a tensor in f64
//
// A tensor of zeros, and positions that are not finite, must be equal. Key ids
// and experts are sets: a row's order does not count; expert weights are
// compared by the expert they belong to. Tolerances follow from the golden's
// own distance from fp64 (`noise`), which meta.json holds:
//
//   f32   max(10 own noise, floor): 2e-6 scalars, 1e-5 activations, 3e-5
//         gradients, 1e-4 auxiliary losses and updated weights
//   bf16  max(2 own noise, 2 x the median noise of the kind)
//
// meta.json lists loss, logits, layer outputs and weight gradients. Noise of
// others is measured where a comparison hangs on it (Tolerances::add_measured).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/dtype.h"
#include "runtime/json.h"
#include "tools/parity/values.h"

namespace tapeline {

class Tolerances {
 public:
  // `meta` is meta.json; without noise_vs_fp64 only floors remain, and bf16 is
  // an error.
  static absl::StatusOr<Tolerances> from_meta(const Json& meta, DType dtype,
                                              double loss);
  double of(const std::string& tensor, ValueKind kind) const;
  bool has_own(const std::string& tensor) const {
    return own_.contains(tensor);
  }

  // Noise that meta.json does not list: what the same rounding does to ours.
  // `ours` and `golden` hold errors against our run in f64 under the same
  // choices; only `ours` is taken, so a wrong golden widens nothing. With
  // `listed` meta.json has to vouch for both first, else nothing is taken: in
  // nine of ten tensors it lists, the golden's error is the noise it says
  // (within 10 % in bf16, twofold in f32), and ours at most twice that. So
  // neither does a wrong model. `other_form`: ours rounds elsewhere than the
  // golden's form of attention, and its noise counts for listed tensors too.
  // The noise of "loss" counts in any case: the one in meta.json is a single
  // draw, which may be near zero by chance.
  struct Measured {
    std::map<std::string, double> golden, ours;
    bool listed = true, other_form = false;
  };
  bool add_measured(const Measured& measured);

 private:
  DType dtype_ = DType::kF32;
  std::map<std::string, double> own_;
  std::map<std::string, ValueKind> kind_of_;  // of what meta.json lists
  std::map<ValueKind, double> median_;
};

struct Comparison {
  std::string quantity, tensor;
  double error = 0, tolerance = 0;
  std::string note;  // why it failed, where the error does not say
  std::string form;  // of attention

  bool pass() const { return note.empty() && error <= tolerance; }
};

// Compares `got` with the golden's tensor of that name. `golden` holds all of
// its tensors and `all` all of ours: weights need the experts beside them.
Comparison compare(const std::string& name, const Values& got,
                   const NamedValues& all, const NamedValues& golden,
                   const Tolerances& tolerances);

// "router_ids" of "mtp0.router_ids" and of "router_ids.3"; "sparse.grad" of
// "sparse.grad.model...".
std::string quantity_of(const std::string& tensor);

}  // namespace tapeline
