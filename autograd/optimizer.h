// Optimizer: one step of AdamW or Muon over named tensors, clipped and guarded.
//
//   g      = combined gradients, sums over the whole step
//   norm   = sqrt(sum over tensors, in name order, of ||g||^2)        f64
//   clip   = min(1, max_norm / (norm + 1e-6))
//   w      = rule(w, clip g)
//
// A tensor is a canonical tensor: a contiguous block of a parameter. The order
// of names fixes the order of the sum, whatever the layout. A parameter that no
// backward reached has gradient zero: its moments decay and it decays. Frozen
// parameters and buffers are not given to the optimizer and never change. A
// norm that is not finite skips the update: no value and no moment changes.
// Clipping and that decision are made where the gradients are: queue() does not
// wait for a device, and settle() takes what the host reads later.
// bf16 parameters have an fp32 master here, from which they are rounded.
//
// State (moments, masters, counters) is read and restored by name for
// snapshots. Not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "autograd/adamw.h"
#include "autograd/gradients.h"
#include "autograd/muon.h"
#include "runtime/parameter.h"
#include "runtime/tensor.h"

namespace tapeline {

struct OptimizedTensor {
  std::string name;  // canonical
  Shape shape;
  int64_t offset = 0;  // elements into the parameter
  Parameter parameter;
  // Heights of the row blocks that Muon orthogonalises one by one, repeated
  // until all rows are used; empty: AdamW updates this tensor.
  std::vector<int64_t> muon_rows;

  // Biases and norm weights do not decay.
  bool decays() const { return shape.rank() >= 2; }
  Tensor block(const Tensor& of) const;
};

struct OptimizerOptions {
  enum class Kind : uint8_t { kAdamW, kMuon };
  Kind kind = Kind::kAdamW;
  AdamWRule adamw = {};
  MuonRule muon = {};
  double max_norm = 1;  // 0: no clipping
};

struct StepReport {
  double grad_norm = 0;
  double clip = 1;
  bool skipped = false;
};

// A block of an optimizer's state, under "m", "v", "momentum" or "master".
struct OptimizerState {
  std::string_view kind;
  std::string name;
  Tensor value;
};

class Optimizer {
 public:
  Optimizer(std::vector<OptimizedTensor> tensors, OptimizerOptions options);

  // Of a model that is spread over ranks: the sum of all tensors' squares from
  // those of these, which are in name order. Null: of these alone. NaN skips
  // the update. With it queue() waits for the device.
  using SumFunction = std::function<double(const std::vector<double>& squares)>;
  void set_sum_of_squares(SumFunction sum) { sum_ = std::move(sum); }

  // Call once per step; `grads` keeps its sums, the caller zeroes them. A loss
  // that is not finite skips the update too. Waits for the device.
  StepReport step(ParameterGradients& grads, double lr, double loss = 0);
  // The same in two parts. The first returns f64 [2] on the device, the squared
  // norm and the clip factor; NaN there: the update is skipped. `losses` are
  // tensors of one element, f32 or f64. The second takes those numbers, before
  // the next update is queued: it is counted from then on.
  Tensor queue(ParameterGradients& grads, double lr,
               const std::vector<Tensor>& losses);
  StepReport settle(const std::vector<double>& queued);

  // In name order.
  const std::vector<OptimizedTensor>& tensors() const { return tensors_; }
  Tensor gradient(ParameterGradients& grads, const OptimizedTensor& t) const;

  // Blocks to save, or to write over when restoring; then set_counts().
  std::vector<OptimizerState> state() const;
  int64_t updates() const { return updates_; }  // bias correction counts these
  int64_t skipped() const { return skipped_; }
  void set_counts(int64_t updates, int64_t skipped);
  // Parameters := masters; after masters were restored.
  void publish() const;

 private:
  // Of one parameter. With Muon `first` is the momentum, else m.
  struct Slot {
    Parameter parameter;
    Tensor master, first, second;
    bool muon = false;
    bool whole = true;  // all its tensors decay or none, so one update does
    bool decays = false;
    int64_t covered = 0;  // elements of its tensors

    bool in_one() const { return whole && covered == master.elements(); }
  };
  Slot& slot(const OptimizedTensor& t) {
    return slots_[slot_of_.at(t.parameter.key())];
  }
  const Slot& slot(const OptimizedTensor& t) const {
    return slots_[slot_of_.at(t.parameter.key())];
  }

  std::vector<OptimizedTensor> tensors_;
  OptimizerOptions options_;
  SumFunction sum_;
  std::vector<Slot> slots_;
  absl::flat_hash_map<const Parameter::State*, size_t> slot_of_;
  int64_t updates_ = 0, skipped_ = 0;
  bool queued_ = false;  // an update that is not settled
};

}  // namespace tapeline
