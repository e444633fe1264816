#include "autograd/optimizer.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <utility>

#include "kernels/elementwise/elementwise.h"
#include "kernels/grad_norm/grad_norm.h"
#include "runtime/access.h"
#include "runtime/check.h"

namespace tapeline {
namespace {

// The squared norm of each of some tensors.
Tensor squares_of(const std::vector<Tensor>& x) {
  const auto count = static_cast<int64_t>(x.size());
  const Tensor each = Tensor::empty({count}, DType::kF64);
  const Tensor partial =
      Tensor::empty({count, kNormPartials}, DType::kF64, Tag::kWorkspace);
  const auto run = [&]<class A>(size_t begin, size_t end) {
    std::deque<Leased<const A>> leases;  // which do not move
    std::vector<View<const A>> views;
    for (size_t i = begin; i < end; ++i) {
      views.push_back(leases.emplace_back(x[i], Device::current().compute()));
    }
    squared_norms<A>(launch(), views, write<double>(partial),
                     write<double>(each.slice(0, static_cast<int64_t>(begin),
                                              static_cast<int64_t>(end))));
  };
  for (size_t begin = 0, end = 0; begin < x.size(); begin = end) {
    const DType dtype = x[begin].dtype();
    while (end < x.size() && x[end].dtype() == dtype) ++end;
    dtype == DType::kF64 ? run.operator()<double>(begin, end)
                         : run.operator()<float>(begin, end);
  }
  return each;
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
      Slot& slot = slots_[at->second];
      CHECK_EQ(slot.muon, muon) << t.name << ": one rule per parameter";
      slot.whole &= slot.decays == t.decays();
      slot.covered += t.shape.elements();
      continue;
    }
    const Tensor& value = t.parameter.value();
    const DType dtype = accumulator_dtype(value.dtype());
    Slot slot{t.parameter, value, {}, {}, muon};
    slot.decays = t.decays();
    slot.covered = t.shape.elements();
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
  std::vector<Tensor> losses;
  if (!std::isfinite(loss)) {
    losses.push_back(Tensor::full({1}, DType::kF64, loss));
  }
  return settle(queue(grads, lr, losses).to_vector<double>());
}

Tensor Optimizer::queue(ParameterGradients& grads, double lr,
                        const std::vector<Tensor>& losses) {
  CHECK(!std::exchange(queued_, true)) << "the last update was not settled";
  const Tensor out = Tensor::zeros({2}, DType::kF64);
  const Tensor squares = out.slice(0, 0, 1), clip_1 = out.slice(0, 1, 2);
  std::vector<Tensor> gradient_of;
  for (const OptimizedTensor& t : tensors_) {
    gradient_of.push_back(gradient(grads, t));
  }
  const Tensor each = squares_of(gradient_of);
  if (sum_) {
    squares.assign<double>({sum_(each.to_vector<double>())});
  } else {
    add_in_order(launch(), read<double>(each), write<double>(squares));
  }
  clip_factor(launch(), read<double>(squares), options_.max_norm,
              write<double>(clip_1));
  if (!losses.empty()) {
    // The squares of losses are finite where they are; their own factor is 1.
    const Tensor total = Tensor::zeros({1}, DType::kF64);
    const Tensor factor = Tensor::empty({1}, DType::kF64);
    const Tensor of_losses = squares_of(losses);
    add_in_order(launch(), read<double>(of_losses), write<double>(total));
    clip_factor(launch(), read<double>(total), 0, write<double>(factor));
    mul<double>(launch(), read<double>(clip_1), read<double>(factor),
                write<double>(clip_1));
  }
  const Leased<const double> clip = read<double>(clip_1);
  UpdateStep update;
  update.lr = lr;
  update.clip_1 = clip.view();
  update.count = updates_ + 1;
  std::vector<MuonMatrix> matrices;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const OptimizedTensor& t = tensors_[i];
    const Slot& s = slot(t);
    if (s.muon) {
      for (const RowBlock& r : row_blocks(t.muon_rows, t.shape[0])) {
        const auto rows = [&](const Tensor& x) {
          return x.slice(0, r.begin, r.end);
        };
        matrices.push_back({rows(t.block(s.master)), rows(gradient_of[i]),
                            rows(t.block(s.first))});
      }
    } else if (!s.in_one()) {
      update.decays = t.decays();
      adamw_update(options_.adamw, update, t.block(s.master), gradient_of[i],
                   t.block(s.first), t.block(s.second));
    }
  }
  // Elements are independent, so many small tensors may go in one launch.
  for (const Slot& s : slots_) {
    if (s.muon || !s.in_one()) continue;
    const Tensor sum = grads.combined(s.parameter);
    update.decays = s.decays;
    adamw_update(options_.adamw, update, s.master, sum, s.first, s.second);
  }
  update.decays = true;
  muon_update(options_.muon, update, matrices);
  publish();
  return out;
}

StepReport Optimizer::settle(const std::vector<double>& queued) {
  CHECK(std::exchange(queued_, false)) << "no update was queued";
  CHECK_EQ(queued.size(), 2u);
  StepReport report;
  report.grad_norm = std::sqrt(queued[0]);
  report.skipped = !std::isfinite(queued[1]);
  if (report.skipped) {
    ++skipped_;
  } else {
    report.clip = queued[1];
    ++updates_;
  }
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
