#include "models/batch.h"

#include <algorithm>

#include "runtime/check.h"

namespace tapeline {
namespace {

constexpr int32_t kIgnored = -100;

// Shifts every sequence left by one; `fill` comes in at the end.
std::vector<int32_t> shift(const std::vector<int32_t>& x,
                           const std::vector<int32_t>& cu_seqlens,
                           int32_t fill) {
  std::vector<int32_t> out(x.size());
  for (size_t s = 1; s < cu_seqlens.size(); ++s) {
    for (int32_t t = cu_seqlens[s - 1]; t < cu_seqlens[s]; ++t) {
      out[t] = t + 1 < cu_seqlens[s] ? x[t + 1] : fill;
    }
  }
  return out;
}

int64_t count_valid(const std::vector<int32_t>& labels) {
  return static_cast<int64_t>(labels.size()) -
         std::count(labels.begin(), labels.end(), kIgnored);
}

Tensor weights(const std::vector<int32_t>& labels, double weight, DType dtype) {
  const Shape shape = {static_cast<int64_t>(labels.size())};
  if (dtype == DType::kF64) {
    std::vector<double> w;
    for (int32_t label : labels) w.push_back(label == kIgnored ? 0 : weight);
    return Tensor::from(w, shape);
  }
  std::vector<float> w;
  for (int32_t label : labels) {
    w.push_back(label == kIgnored ? 0 : static_cast<float>(weight));
  }
  return Tensor::from(w, shape);
}

// A loss without a valid label is 0, not 0/0.
double inverse(int64_t count) {
  return count == 0 ? 0 : 1.0 / static_cast<double>(count);
}

}  // namespace

Denominators count_targets(const std::vector<HostBatch>& batches,
                           int mtp_depths) {
  Denominators n;
  n.mtp.assign(mtp_depths, 0);
  for (const HostBatch& batch : batches) {
    n.tokens += static_cast<int64_t>(batch.ids.size());
    n.lm += count_valid(batch.labels);
    std::vector<int32_t> labels = batch.labels;
    for (int d = 0; d < mtp_depths; ++d) {
      labels = shift(labels, batch.cu_seqlens, kIgnored);
      n.mtp[d] += count_valid(labels);
    }
  }
  return n;
}

Batch make_batch(const HostBatch& host, const Denominators& n,
                 double mtp_weight, DType weight_dtype) {
  CHECK(host.ids.size() == host.labels.size() && !host.cu_seqlens.empty() &&
        host.cu_seqlens.back() == static_cast<int32_t>(host.ids.size()))
      << "[batch] " << host.ids.size() << " ids, " << host.labels.size()
      << " labels";
  const Shape shape = {static_cast<int64_t>(host.ids.size())};
  Batch batch;
  batch.cu_seqlens = host.cu_seqlens;
  batch.tokens = shape[0];
  batch.ids_T = Tensor::from(host.ids, shape);
  batch.label_T = Tensor::from(host.labels, shape);
  batch.weight_T = weights(host.labels, inverse(n.lm), weight_dtype);
  std::vector<int32_t> ids = host.ids, labels = host.labels;
  const double depths = static_cast<double>(n.mtp.size());
  for (int64_t valid : n.mtp) {
    ids = shift(ids, host.cu_seqlens, 0);
    labels = shift(labels, host.cu_seqlens, kIgnored);
    batch.mtp.push_back(
        {Tensor::from(ids, shape), Tensor::from(labels, shape),
         weights(labels, mtp_weight / depths * inverse(valid), weight_dtype)});
  }
  return batch;
}

}  // namespace tapeline
