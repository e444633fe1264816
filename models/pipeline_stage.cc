#include "models/pipeline_stage.h"

#include <string>
#include <utility>

#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/status.h"

namespace tapeline {

double scalar_value(const Tensor& x) {
  if (x.dtype() == DType::kF64) return x.to_vector<double>()[0];
  return x.to_vector<float>()[0];
}

StepLog::StepLog(int micro_batches, int layers, int64_t experts, int first)
    : micro_batches_(micro_batches),
      layers_(layers),
      experts_(experts),
      first_(first),
      losses_(static_cast<size_t>(2 * micro_batches)),
      auxiliary_(static_cast<size_t>(micro_batches * layers * kKinds)),
      counts_(static_cast<size_t>(layers * (experts + 1))) {}

void StepLog::set_losses(int micro_batch, const Tensor& lm,
                         const std::vector<Tensor>& mtp) {
  micro_batch += first_;
  double* entries = losses_.data() + 2 * micro_batch;
  pending_.push_back({entries, 1, {lm.detach()}});
  Pending& depths = pending_.emplace_back(Pending{entries + 1, 1, {}});
  for (const Tensor& loss : mtp) depths.numbers.push_back(loss.detach());
  read_what_is_there();
}

void StepLog::add_statistics(int micro_batch, const Context& ctx) {
  micro_batch += first_;
  for (const auto& [layer, of] : ctx.statistics) {
    const auto add = [&](int kind, double weight,
                         const std::vector<Tensor>& losses) {
      if (losses.empty()) return;
      pending_.push_back(
          {auxiliary_.data() + at(micro_batch, layer, kind), weight, losses});
    };
    add(0, ctx.weights.balance, of.balance_loss);
    add(1, ctx.weights.z, of.z_loss);
    add(2, 1, of.indexer_loss);
    for (const Tensor& counts_E : of.expert_counts_E) {
      pending_counts_.push_back({layer, counts_E});
    }
  }
  read_what_is_there();
}

// Where what was queued is done, numbers need not be kept.
void StepLog::read_what_is_there() {
  if (Device::current().kind() == DeviceKind::kCpu) read();
}

void StepLog::read() {
  for (const Pending& of : std::exchange(pending_, {})) {
    double sum = 0;
    for (const Tensor& x : of.numbers) sum += scalar_value(x);
    *of.entry = of.weight * sum;
  }
  for (const PendingCounts& of : std::exchange(pending_counts_, {})) {
    int64_t* counts = counts_.data() + of.layer * (experts_ + 1);
    const std::vector<int64_t> more = of.counts_E.to_vector<int64_t>();
    CHECK_EQ(static_cast<int64_t>(more.size()), experts_);
    for (int64_t e = 0; e < experts_; ++e) counts[e] += more[e];
    counts[experts_] = 1;
  }
}

// Each entry is one rank's, 0 elsewhere: a sum changes no bit.
absl::Status StepLog::exchange(Communicator& communicator,
                               absl::Duration timeout) {
  read();
  Collective all{"step log", {}};
  for (int r = 0; r < communicator.size(); ++r) all.ranks.push_back(r);
  const auto reduce = [&]<class T>(std::vector<T>& values) -> absl::Status {
    if (values.empty()) return absl::OkStatus();
    const Tensor x =
        Tensor::from(values, {static_cast<int64_t>(values.size())});
    RETURN_IF_ERROR(communicator.all_reduce(all, x, timeout));
    values = x.to_vector<T>();
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(reduce(losses_));
  RETURN_IF_ERROR(reduce(auxiliary_));
  return reduce(counts_);
}

double StepLog::sum(int which) const {
  double sum = 0;
  for (int j = 0; j < micro_batches_; ++j) {
    sum += losses_[static_cast<size_t>(2 * j + which)];
  }
  return sum;
}

double StepLog::layer_sum(int kind) const {
  double sum = 0;
  for (int j = 0; j < micro_batches_; ++j) {
    for (int layer = 0; layer < layers_; ++layer) {
      sum += auxiliary_[at(j, layer, kind)];
    }
  }
  return sum;
}

std::vector<int64_t> StepLog::expert_counts(int layer) const {
  const int64_t* counts = counts_.data() + layer * (experts_ + 1);
  if (counts[experts_] == 0) return {};
  return {counts, counts + experts_};
}

std::vector<Tensor> message_of(const StageState& state, const StageCut& cut) {
  std::vector<Tensor> out;
  if (cut.hidden) out.push_back(state.hidden_TD);
  CHECK(!cut.hidden || static_cast<int>(state.depths_TD.size()) == cut.depths);
  for (int d = 0; d < cut.depths; ++d) out.push_back(state.depths_TD[d]);
  if (cut.selected) {
    CHECK(state.selected) << "[stage] the next layer shares a selection";
    out.push_back(state.selected->ids_TK);
  }
  return out;
}

StageState state_of(const std::vector<Tensor>& message, const StageCut& cut) {
  StageState out;
  size_t next = 0;
  if (cut.hidden) out.hidden_TD = message.at(next++);
  for (int d = 0; d < cut.depths; ++d) {
    out.depths_TD.push_back(message.at(next++));
  }
  if (cut.selected) {
    out.selected =
        DsaSelection{message.at(next++), std::make_shared<InvertedSelection>()};
  }
  CHECK_EQ(next, message.size());
  return out;
}

std::vector<TensorSpec> message_specs(const StageCut& cut, int64_t tokens,
                                      int64_t dim, int64_t selected_keys,
                                      DType dtype) {
  const int states = (cut.hidden ? 1 : 0) + cut.depths;
  std::vector<TensorSpec> out(static_cast<size_t>(states),
                              {dtype, {tokens, dim}});
  if (cut.selected) out.push_back({DType::kI32, {tokens, selected_keys}});
  return out;
}

std::unique_ptr<StageContext> make_stage_context(const StepData& data,
                                                 const StageMemory& memory,
                                                 const Pass& pass, int layers,
                                                 bool needs_batch) {
  const HostBatch& host = data.batches[pass.micro_batch];
  auto out = std::make_unique<StageContext>();
  Context& ctx = out->ctx;
  ctx.sequence = Sequence::packed(host.cu_seqlens);
  ctx.recompute = memory.recompute;
  if (pass.recompute) ctx.recompute.assign(static_cast<size_t>(layers), true);
  ctx.keep = memory.keep;
  ctx.drop_norms = memory.drop_norms;
  const auto tokens = static_cast<double>(data.n.tokens);
  const double share = static_cast<double>(host.ids.size()) / tokens;
  ctx.weights = {.balance = data.coefficients.balance * share,
                 .z = data.coefficients.z * share,
                 .indexer = data.coefficients.indexer / tokens};
  if (needs_batch) {
    out->batch = make_batch(host, data.n, data.mtp_weight, DType::kF32);
  }
  return out;
}

}  // namespace tapeline
