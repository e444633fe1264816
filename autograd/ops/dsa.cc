#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "autograd/observer.h"
#include "autograd/ops.h"
#include "autograd/ops/op.h"
#include "autograd/shape_rules.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/indexer/indexer.h"
#include "kernels/indexer_loss/indexer_loss.h"
#include "kernels/sparse_attention/sparse_attention.h"

namespace tapeline {
namespace {

using internal::broadcast;
using internal::empty_like;
using internal::rows_or_copy;

// Built by the first backward of the layers that share a selection.
void build_inverse(InvertedSelection& inverse, const Tensor& ids_TK,
                   int64_t keys) {
  if (inverse.offsets_S1) return;
  inverse.offsets_S1 = Tensor::empty({keys + 1}, DType::kI32);
  inverse.entries = Tensor::empty({ids_TK.elements()}, DType::kI32);
  const auto ids = read<int32_t>(ids_TK);
  const Tensor space =
      internal::workspace(invert_ids_workspace_bytes(launch(), ids, keys));
  invert_ids(launch(), ids, write<int32_t>(inverse.offsets_S1),
             write<int32_t>(inverse.entries),
             internal::bytes_of(write<uint8_t>(space).view()));
}

struct SparseAttentionNode : Node {
  SavedTensor q, kv, ids, o, lse;
  std::shared_ptr<InvertedSelection> inverse;
  double scale = 1;

  void backward_inputs(Backward& b) override {
    const Tensor q_THD = q.unpack(), kv_SD = kv.unpack(), ids_TK = ids.unpack();
    const Tensor o_THV = o.unpack();
    build_inverse(*inverse, ids_TK, kv_SD.size(0));
    Tensor dq = empty_like(q_THD), dkv = empty_like(kv_SD);
    dispatch_float(q_THD.dtype(), [&]<class T>() {
      using A = Accumulator<T>;
      const auto q = read<T>(q_THD), kv = read<T>(kv_SD);
      const auto o = read<T>(o_THV);
      const auto ids = read<int32_t>(ids_TK);
      const Tensor space =
          internal::workspace(sparse_attention_backward_workspace_bytes<T>(
              launch(), q, kv, ids, o, scale));
      sparse_attention_backward<T>(
          launch(), read<T>(b.grad()), q, kv, ids, o, read<A>(lse.unpack()),
          read<int32_t>(inverse->offsets_S1), read<int32_t>(inverse->entries),
          scale, write<T>(dq), write<T>(dkv),
          internal::bytes_of(write<uint8_t>(space).view()));
    });
    b.add(0, std::move(dq));
    b.add(1, std::move(dkv));
  }
};

struct IndexerLossNode : Node {
  SavedTensor q, k, w, dscore, ids, row_weight;
  std::shared_ptr<InvertedSelection> inverse;
  double scale = 1;

  void backward_inputs(Backward& b) override {
    const Tensor q_THD = q.unpack(), k_SD = k.unpack(), w_TH = w.unpack();
    const Tensor ids_TK = ids.unpack(), weight_T = row_weight.unpack();
    build_inverse(*inverse, ids_TK, k_SD.size(0));
    Tensor dq = empty_like(q_THD), dk = empty_like(k_SD), dw = empty_like(w_TH);
    const Tensor scaled = empty_like(weight_T);
    dispatch_float(q_THD.dtype(), [&]<class T>() {
      using A = Accumulator<T>;
      mul(launch(), read<A>(weight_T).view(),
          broadcast(read<A>(b.grad()).view(), weight_T.shape()),
          write<A>(scaled).view());
      const auto q = read<T>(q_THD), k = read<T>(k_SD);
      const auto ids = read<int32_t>(ids_TK);
      const Tensor space = internal::workspace(
          indexer_loss_backward_workspace_bytes<T>(launch(), q, k, ids, scale));
      indexer_loss_backward<T>(
          launch(), read<A>(dscore.unpack()), read<A>(scaled), q, k,
          read<A>(w_TH), scale, ids, read<int32_t>(inverse->offsets_S1),
          read<int32_t>(inverse->entries), write<T>(dq), write<T>(dk),
          write<A>(dw), internal::bytes_of(write<uint8_t>(space).view()));
    });
    b.add(0, std::move(dq));
    b.add(1, std::move(dk));
    b.add(2, std::move(dw));
  }
};

}  // namespace

DsaSelection select_keys(const Tensor& q_in, const Tensor& k_in,
                         const Tensor& w_in, const Sequence& sequence,
                         double scale, int top_k) {
  const Tensor q = rows_or_copy(q_in), k = rows_or_copy(k_in);
  const Tensor w_TH = rows_or_copy(w_in);
  internal::check_dtypes("select_keys", q, k);
  internal::check_accumulates("select_keys", q, w_TH);
  const Tensor ids_TK = Tensor::empty(
      internal::checked(shape_rules::select_keys(
          q.shape(), k.shape(), w_TH.shape(), sequence.tokens(), top_k)),
      DType::kI32);
  dispatch_float(q.dtype(), [&]<class T>() {
    const auto first = read<int32_t>(sequence.begin_T);
    const auto last = read<int32_t>(sequence.end_T);
    const Tensor space = internal::workspace(
        indexer_select_workspace_bytes<T>(launch(), q.size(0), k.size(0)));
    indexer_select<T>(launch(), read<T>(q), read<T>(k),
                      read<Accumulator<T>>(w_TH), {first.view(), last.view()},
                      scale, top_k, write<int32_t>(ids_TK),
                      internal::bytes_of(write<uint8_t>(space).view()));
  });
  observe_with("index_scores", [&] {
    const Tensor scores_TS =
        Tensor::empty({q.size(0), k.size(0)}, accumulator_dtype(q.dtype()));
    dispatch_float(q.dtype(), [&]<class T>() {
      const auto first = read<int32_t>(sequence.begin_T);
      const auto last = read<int32_t>(sequence.end_T);
      indexer_scores<T>(launch(), read<T>(q), read<T>(k),
                        read<Accumulator<T>>(w_TH), {first.view(), last.view()},
                        scale, write<Accumulator<T>>(scores_TS));
    });
    return scores_TS;
  });
  return {observe_choice("index_ids", ids_TK),
          std::make_shared<InvertedSelection>()};
}

DsaSelection select_all_keys(const Sequence& sequence) {
  const std::vector<int32_t> begin = sequence.begin_T.to_vector<int32_t>();
  const std::vector<int32_t> end = sequence.end_T.to_vector<int32_t>();
  int32_t most = 1;
  for (size_t t = 0; t < begin.size(); ++t) {
    most = std::max(most, end[t] - begin[t]);
  }
  std::vector<int32_t> ids;
  ids.reserve(begin.size() * static_cast<size_t>(most));
  for (size_t t = 0; t < begin.size(); ++t) {
    for (int32_t j = 0; j < most; ++j) {
      ids.push_back(begin[t] + j < end[t] ? begin[t] + j : -1);
    }
  }
  return {Tensor::from(ids, {sequence.tokens(), most}),
          std::make_shared<InvertedSelection>()};
}

SparseAttention sparse_attention(const Tensor& q_in, const Tensor& kv_in,
                                 const DsaSelection& selection, double scale,
                                 int64_t value_dim) {
  const Tensor q = rows_or_copy(q_in), kv = rows_or_copy(kv_in);
  internal::check_dtypes("sparse_attention", q, kv);
  const Shape shape = internal::checked(shape_rules::sparse_attention(
      q.shape(), kv.shape(), selection.ids_TK.shape(), value_dim));
  SparseAttention out;
  internal::make_outputs("sparse_attention", {&out.o_THV, &out.lse_TH}, [&] {
    out.o_THV = Tensor::empty(shape, q.dtype());
    out.lse_TH =
        Tensor::empty({q.size(0), q.size(1)}, accumulator_dtype(q.dtype()));
    dispatch_float(q.dtype(), [&]<class T>() {
      sparse_attention_forward<T>(
          launch(), read<T>(q), read<T>(kv), read<int32_t>(selection.ids_TK),
          scale, write<T>(out.o_THV), write<Accumulator<T>>(out.lse_TH));
    });
  });
  if (auto* n = push<SparseAttentionNode>("sparse_attention", {&q_in, &kv_in},
                                          {&out.o_THV})) {
    CHECK(selection.inverse != nullptr)
        << "[sparse_attention] a selection made by hand needs an inverse";
    n->q.save(q);
    n->kv.save(kv);
    n->ids.save(selection.ids_TK);
    n->o.save(out.o_THV);
    n->lse.save(out.lse_TH);
    n->inverse = selection.inverse;
    n->scale = scale;
  }
  observe_with("attn_lse", [&] { return out.lse_TH; });
  return out;
}

Tensor indexer_loss(const Tensor& q_in, const Tensor& k_in, const Tensor& w_in,
                    double index_scale, const AttentionTarget& target,
                    const DsaSelection& selection, const Tensor& row_weight_T) {
  const Tensor q = rows_or_copy(q_in), k = rows_or_copy(k_in);
  const Tensor w_TH = rows_or_copy(w_in);
  const Tensor& ids_TK = selection.ids_TK;
  const DType acc = accumulator_dtype(q.dtype());
  CHECK(q.rank() == 3 && k.rank() == 2 && k.size(1) == q.size(2) &&
        w_TH.shape() == Shape({q.size(0), q.size(1)}) && ids_TK.rank() == 2 &&
        ids_TK.size(0) == q.size(0) && row_weight_T.shape() == Shape{q.size(0)})
      << "[indexer_loss] q is " << q << ", k is " << k << ", w is " << w_TH
      << ", ids are " << ids_TK << ", row weights are " << row_weight_T;
  CHECK(target.q_THD.rank() == 3 && target.kv_SD.rank() == 2 &&
        target.q_THD.size(0) == q.size(0) &&
        target.kv_SD.size(0) == k.size(0) &&
        target.q_THD.size(2) == target.kv_SD.size(1))
      << "[indexer_loss] the target's q is " << target.q_THD << ", its kv is "
      << target.kv_SD << " beside q " << q << " and k " << k;
  internal::check_dtypes("indexer_loss", q, k);
  internal::check_dtypes("indexer_loss", q, target.q_THD);
  internal::check_dtypes("indexer_loss", q, target.kv_SD);
  internal::check_accumulates("indexer_loss", q, w_TH);
  internal::check_accumulates("indexer_loss", q, row_weight_T);
  const Tensor loss_T = Tensor::empty(row_weight_T.shape(), acc);
  const Tensor dscore_TK = Tensor::empty(ids_TK.shape(), acc);
  const Tensor target_TK =
      observer() == nullptr ? Tensor() : Tensor::empty(ids_TK.shape(), acc);
  Tensor loss = Tensor::empty({1}, acc);
  dispatch_float(q.dtype(), [&]<class T>() {
    using A = Accumulator<T>;
    indexer_loss_forward<T>(launch(), read<T>(q), read<T>(k), read<A>(w_TH),
                            index_scale, read<T>(rows_or_copy(target.q_THD)),
                            read<T>(rows_or_copy(target.kv_SD)),
                            read<A>(target.lse_TH), target.scale,
                            read<int32_t>(ids_TK), write<A>(loss_T),
                            write<A>(dscore_TK),
                            target_TK ? write<A>(target_TK).view() : View<A>());
    observe_with("index_kl_rows", [&] { return loss_T; });
    observe_with("index_target_ids", [&] { return ids_TK; });
    observe_with("index_target", [&] { return target_TK; });
    mul(launch(), read<A>(loss_T).view(), read<A>(row_weight_T).view(),
        write<A>(loss_T).view());
    sum(launch(), read<A>(loss_T).view(), write<A>(loss).view());
  });
  if (auto* n = push<IndexerLossNode>("indexer_loss", {&q_in, &k_in, &w_in},
                                      {&loss})) {
    CHECK(selection.inverse != nullptr)
        << "[indexer_loss] a selection made by hand needs an inverse";
    n->q.save(q);
    n->k.save(k);
    n->w.save(w_TH);
    n->dscore.save(dscore_TK);
    n->ids.save(ids_TK);
    n->row_weight.save(row_weight_T);
    n->inverse = selection.inverse;
    n->scale = index_scale;
  }
  return loss;
}

}  // namespace tapeline
