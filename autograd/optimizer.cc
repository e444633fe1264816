#include "autograd/optimizer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/elementwise/elementwise.h"
#include "kernels/grad_norm/grad_norm.h"
#include "runtime/access.h"
#include "runtime/check.h"

namespace tapeline {
namespace {

double squared_norm_of(const Tensor& x) {
  if (x.dtype() == DType::kF64) {
    return squared_norm<double>(launch(), read<double>(x));
  }
  return squared_norm<float>(launch(), read<float>(x));
}

}  // namespace

Tensor OptimizedTensor::block(const Tensor& of) const {
  return of.view_as({of.elements()})
      .slice(0, offset, offset + shape.elements())
      .view_as(shape);
}

Optimizer::Optimizer(std::vector<OptimizedTensor> tensors,
                     OptimizerOptions options)
    : tensors_(std::move(tensors)), options_(options) {
  std::sort(tensors_.begin(), tensors_.end(),
            [](const OptimizedTensor& a, const OptimizedTensor& b) {
              return a.name < b.name;
            });
  for (const OptimizedTensor& t : tensors_) {
    const bool muon =
        options_.kind == OptimizerOptions::Kind::kMuon && !t.muon_rows.empty();
    CHECK(t.parameter.trainable()) << t.name << " is frozen";
    CHECK(!muon || t.shape.rank() == 2)
        << "[muon] " << t.name << " is no matrix: " << t.shape;
    const auto [at, fresh] =
        slot_of_.try_emplace(t.parameter.key(), slots_.size());
    if (!fresh) {
      CHECK_EQ(slots_[at->second].muon, muon)
          << t.name << ": one rule per parameter";
      continue;
    }
    const Tensor& value = t.parameter.value();
    const DType dtype = accumulator_dtype(value.dtype());
    Slot slot{t.parameter, value, {}, {}, muon};
    slot.first = Tensor::zeros(value.shape(), dtype, Tag::kOptimizer);
    if (!muon) {
      slot.second = Tensor::zeros(value.shape(), dtype, Tag::kOptimizer);
    }
    if (value.dtype() != dtype) {
      slot.master = Tensor::empty(value.shape(), dtype, Tag::kOptimizer);
      cast<bf16, float>(launch(), read<bf16>(value), write<float>(slot.master));
    }
    slots_.push_back(std::move(slot));
  }
}

Tensor Optimizer::gradient(ParameterGradients& grads,
                           const OptimizedTensor& t) const {
  Tensor sum = grads.combined(t.parameter);
  // Unreached: the zeros that its accumulator starts from.
  if (!sum) sum = grads.accumulator(t.parameter, 0);
  return t.block(sum);
}

StepReport Optimizer::step(ParameterGradients& grads, double lr, double loss) {
  std::vector<Tensor> gradient_of;
  std::vector<double> squares;
  double sum = 0;
  for (const OptimizedTensor& t : tensors_) {
    gradient_of.push_back(gradient(grads, t));
    squares.push_back(squared_norm_of(gradient_of.back()));
    sum += squares.back();
  }
  StepReport report;
  report.grad_norm = std::sqrt(sum_ ? sum_(squares) : sum);
  if (!std::isfinite(report.grad_norm) || !std::isfinite(loss)) {
    report.skipped = true;
    ++skipped_;
    return report;
  }
  if (options_.max_norm > 0) {
    report.clip =
        std::min(1.0, options_.max_norm / (report.grad_norm + kClipEps));
  }
  ++updates_;
  std::vector<MuonMatrix> matrices;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const OptimizedTensor& t = tensors_[i];
    const Slot& s = slot(t);
    const UpdateStep update = {lr, report.clip, updates_, t.decays()};
    if (s.muon) {
      for (const RowBlock& r : row_blocks(t.muon_rows, t.shape[0])) {
        const auto rows = [&](const Tensor& x) {
          return x.slice(0, r.begin, r.end);
        };
        matrices.push_back({rows(t.block(s.master)), rows(gradient_of[i]),
                            rows(t.block(s.first))});
      }
    } else {
      adamw_update(options_.adamw, update, t.block(s.master), gradient_of[i],
                   t.block(s.first), t.block(s.second));
    }
  }
  muon_update(options_.muon, {lr, report.clip, updates_, true}, matrices);
  publish();
  return report;
}

std::vector<OptimizerState> Optimizer::state() const {
  std::vector<OptimizerState> out;
  for (const OptimizedTensor& t : tensors_) {
    const Slot& s = slot(t);
    out.push_back({s.muon ? "momentum" : "m", t.name, t.block(s.first)});
    if (s.second) out.push_back({"v", t.name, t.block(s.second)});
    if (s.master.dtype() != t.parameter.value().dtype()) {
      out.push_back({"master", t.name, t.block(s.master)});
    }
  }
  return out;
}

void Optimizer::set_counts(int64_t updates, int64_t skipped) {
  updates_ = updates;
  skipped_ = skipped;
}

void Optimizer::publish() const {
  for (const Slot& s : slots_) {
    const Tensor& value = s.parameter.value();
    if (value.dtype() == s.master.dtype()) continue;
    cast<float, bf16>(launch(), read<float>(s.master), write<bf16>(value));
  }
}

}  // namespace tapeline
