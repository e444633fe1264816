#include "models/dsa.h"

#include "runtime/check.h"

namespace tapeline {

AttentionOutput DsaAttention::operator()(
    const Tensor& x_TD, const std::optional<DsaSelection>& shared,
    Context& ctx) const {
  const MlaStates s = mla.project(x_TD, ctx.rope);
  // The indexer learns from its own loss alone: it sees its inputs as
  // constants (DeepSeek-V3.2 report, sparse stage).
  std::optional<IndexerStates> index;
  if (indexer && !(reuses_given && shared)) {
    LayerScope scope("indexer");
    index = indexer->project(x_TD.detach(), s.query_latent_TQ.detach(),
                             ctx.index_rope);
    index->key_SI = ctx.cached(layer, "index_key", index->key_SI);
  }
  CHECK(index || shared) << "layer " << layer
                         << " shares an index selection, but none was given; ";
  const DsaSelection selected =
      index ? indexer->select(*index, ctx.sequence) : *shared;

  const Tensor query_THD = mla.absorbed_query_THD(s);
  const Tensor key_SD = ctx.cached(layer, "key", mla.absorbed_key_TD(s));
  const SparseAttention a = sparse_attention(query_THD, key_SD, selected,
                                             c.softmax_scale, c.latent_rank);
  Tensor y_TD;
  if (absorbed) {
    y_TD = mla.absorbed_output(a.o_THV);
  } else {
    CHECK(ctx.cache == nullptr)
        << "decoding with a cache uses the absorbed form; ";
    const auto [k_THD, v_THV] = mla.keys_values(s);
    y_TD = mla.merge(selected_attention(mla.query_THD(s), k_THD, v_THV,
                                        selected, c.softmax_scale));
  }
  if (index && train_indexer && ctx.weights.indexer != 0) {
    LayerScope scope("indexer_loss");
    const Tensor loss = indexer_loss(
        index->query_THI, index->key_SI, index->weight_TH, index_config.scale(),
        {query_THD.detach(), key_SD.detach(), a.lse_TH, c.softmax_scale},
        selected, ctx.indexer_row_weight(a.lse_TH.dtype()));
    y_TD = ctx.attach_indexer(y_TD, layer, loss);
  }
  return {y_TD, selected};
}

}  // namespace tapeline
