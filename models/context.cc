#include "models/context.h"

#include <algorithm>

namespace tapeline {
namespace {

Shape with_rows(Shape shape, int64_t rows) {
  shape[0] = rows;
  return shape;
}

void copy_rows(const Tensor& from, const Tensor& to) {
  const auto bytes = static_cast<size_t>(from.bytes());
  Stream& stream = to.storage()->device().compute();
  const auto offset_bytes = [](const Tensor& t) {
    return t.offset() * static_cast<int64_t>(size_of(t.dtype()));
  };
  const std::byte* source = from.storage()->acquire(stream);
  std::byte* target = to.storage()->acquire(stream, /*will_write=*/true);
  stream.copy(target + offset_bytes(to), source + offset_bytes(from), bytes);
  to.storage()->bump_version();
  to.storage()->release(stream, true);
  from.storage()->release(stream, false);
}

}  // namespace

Tensor KvCache::append(int layer, const std::string& kind, const Tensor& rows) {
  Rows& entry = rows_[{layer, kind}];
  const int64_t wanted = entry.used + rows.size(0);
  if (!entry.data || entry.data.size(0) < wanted) {
    const Tensor grown = Tensor::empty(
        with_rows(rows.shape(), std::max<int64_t>(64, 2 * wanted)),
        rows.dtype());
    if (entry.used > 0) {
      copy_rows(entry.data.slice(0, 0, entry.used),
                grown.slice(0, 0, entry.used));
    }
    entry.data = grown;
  }
  copy_rows(rows.contiguous() ? rows : rows.clone(),
            entry.data.slice(0, entry.used, wanted));
  entry.used = wanted;
  return entry.data.slice(0, 0, wanted);
}

int64_t KvCache::tokens(int layer, const std::string& kind) const {
  const auto found = rows_.find({layer, kind});
  return found == rows_.end() ? 0 : found->second.used;
}

Tensor Context::cached(int layer, const std::string& kind, const Tensor& rows) {
  CHECK(cache == nullptr || phase() == Phase::kOriginal)
      << "layer " << layer << " is recomputed while it decodes with a cache";
  return cache == nullptr ? rows : cache->append(layer, kind, rows);
}

Tensor Context::attach_router(const Tensor& y_in, int layer,
                              const Tensor& logits_TE, const Tensor& bias_E,
                              const Tensor& expert_TK,
                              const BalanceRule& rule) {
  Tensor y = y_in;
  LayerStatistics& log = statistics[layer];
  if (count_experts && phase() == Phase::kOriginal) {
    log.expert_counts_E.push_back(
        tapeline::count_experts(expert_TK, valid_T, logits_TE.size(1)));
  }
  if (weights.balance != 0) {
    const Tensor loss =
        balance_loss(logits_TE, bias_E, expert_TK, valid_T, rule);
    once([&] { log.balance_loss.push_back(loss.detach()); });
    y = attach(y, loss, weights.balance);
  }
  if (weights.z != 0) {
    const Tensor loss = z_loss(logits_TE, valid_T);
    once([&] { log.z_loss.push_back(loss.detach()); });
    y = attach(y, loss, weights.z);
  }
  return y;
}

Tensor Context::attach_indexer(const Tensor& y, int layer, const Tensor& loss) {
  once([&] { statistics[layer].indexer_loss.push_back(loss.detach()); });
  return attach(y, loss, 1.0);
}

Tensor Context::indexer_row_weight(DType dtype) const {
  const Shape shape = {sequence.tokens()};
  if (!valid_T) return Tensor::full(shape, dtype, weights.indexer);
  std::vector<uint8_t> valid = valid_T.to_vector<uint8_t>();
  if (dtype == DType::kF64) {
    std::vector<double> w(valid.begin(), valid.end());
    for (double& x : w) x *= weights.indexer;
    return Tensor::from(w, shape);
  }
  std::vector<float> w(valid.begin(), valid.end());
  for (float& x : w) x *= static_cast<float>(weights.indexer);
  return Tensor::from(w, shape);
}

}  // namespace tapeline
