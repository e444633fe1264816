#include "models/latent_attention.h"

#include "autograd/checkpoint.h"
#include "autograd/observer.h"
#include "runtime/check.h"

namespace tapeline {

Tensor LatentAttention::over_all_keys(const MlaStates& s, Context& ctx) const {
  if (!absorbed && ctx.cache == nullptr) {
    const auto [k_THD, v_THV] = mla.keys_values(s);
    return mla.merge(attention(mla.query_THD(s), k_THD, v_THV, ctx.sequence,
                               c.softmax_scale));
  }
  // One key head, whose first columns are the values.
  const Tensor key_SD = ctx.cached(layer, "key", mla.absorbed_key_TD(s));
  const int64_t keys = key_SD.size(0), width = key_SD.size(1);
  const Tensor key_S1D = reshape(key_SD, {keys, 1, width});
  const Tensor value_S1L =
      split(key_S1D, {c.latent_rank, width - c.latent_rank})[0];
  return mla.absorbed_output(attention(mla.absorbed_query_THD(s), key_S1D,
                                       value_S1L, ctx.sequence,
                                       c.softmax_scale));
}

Tensor LatentAttention::over_selected_keys(
    const MlaStates& s, const DsaSelection& selected,
    const std::optional<IndexerStates>& index, Context& ctx) const {
  const bool trains = index.has_value();
  Tensor query_THD, key_SD, y_TD;
  SparseAttention a;
  if (absorbed || trains || ctx.cache != nullptr) {
    query_THD = mla.absorbed_query_THD(s);
    key_SD = ctx.cached(layer, "key", mla.absorbed_key_TD(s));
  }
  if (absorbed || ctx.cache != nullptr) {
    a = sparse_attention(query_THD, key_SD, selected, c.softmax_scale,
                         c.latent_rank);
    y_TD = mla.absorbed_output(a.o_THV);
  } else {
    const auto [k_THD, v_THV] = mla.keys_values(s);
    y_TD = mla.merge(selected_attention(mla.query_THD(s), k_THD, v_THV,
                                        selected, c.softmax_scale));
  }
  if (!trains) return y_TD;
  LayerScope scope("indexer_loss");
  const Tensor q_THD = query_THD.detach(), kv_SD = key_SD.detach();
  DsaSelection keys = selected;
  if (training == IndexerTraining::kAllKeys) {
    keys = select_all_keys(ctx.sequence);
    a = {};
  }
  if (!a.lse_TH) {
    a = sparse_attention(q_THD, kv_SD, keys, c.softmax_scale, c.latent_rank);
  }
  const Tensor loss = indexer_loss(
      index->query_THI, index->key_SI, index->weight_TH, index_config.scale(),
      {q_THD, kv_SD, a.lse_TH, c.softmax_scale}, keys,
      ctx.indexer_row_weight(a.lse_TH.dtype()));
  return ctx.attach_indexer(y_TD, layer, loss);
}

AttentionOutput LatentAttention::operator()(
    const Tensor& x_TD, const std::optional<DsaSelection>& shared,
    Context& ctx) const {
  const MlaStates s = mla.project(x_TD, ctx.rope);
  if (!sparse) return {over_all_keys(s, ctx), std::nullopt};
  // The indexer learns from its own loss alone: it sees its inputs as
  // constants (DeepSeek-V3.2 report, sparse stage).
  std::optional<IndexerStates> index;
  DsaSelection selected;
  if (indexer && !(reuses_given && shared)) {
    LayerScope scope("indexer");
    const auto project = [&] {
      IndexerStates states = indexer->project(
          x_TD.detach(), s.query_latent_TQ.detach(), ctx.index_rope);
      states.key_SI = ctx.cached(layer, "index_key", states.key_SI);
      return states;
    };
    // One that learns is projected again on a replay; of another a replay needs
    // its choice alone.
    if (training != IndexerTraining::kFrozen && ctx.weights.indexer != 0) {
      index = project();
    }
    selected = stash([&] {
      return indexer->select(index ? *index : project(), ctx.sequence);
    });
  } else {
    CHECK(shared) << "layer " << layer
                  << " shares an index selection, but none was given; ";
    selected = *shared;
  }
  observe_with("selected_ids", [&] { return selected.ids_TK; });
  return {over_selected_keys(s, selected, index, ctx), selected};
}

}  // namespace tapeline
