// Latent attention over every key of a sequence, or over those a learned
// indexer selects (DeepSeek-V3.2; GLM-5.2 shares one selection among several
// layers, arXiv 2603.12201).
//
// Shape suffixes: T tokens, S keys, D model, Q query latent, H heads, I index
// dims, K selected keys per token, L latent rank, V value dims.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "autograd/ops.h"
#include "models/context.h"
#include "models/layers.h"
#include "models/mla.h"

namespace tapeline {

struct IndexerConfig {
  int64_t dim = 0, query_rank = 0, heads = 0, head_dim = 0, rope_dim = 0;
  int top_k = 0;
  double key_eps = 1e-6;

  double scale() const { return 1 / std::sqrt(static_cast<double>(head_dim)); }
};

struct IndexerStates {
  Tensor query_THI, key_SI, weight_TH;
};

// score[t,s] = sum_h weight[t,h] relu(query[t,h] . key[s] head_dim^-0.5)
struct Indexer {
  IndexerConfig c;
  Linear q_b{c.query_rank, c.heads* c.head_dim};
  Linear k{c.dim, c.head_dim};
  LayerNorm k_norm{c.head_dim, c.key_eps};
  Linear weights{c.dim, c.heads};
  FIELDS(q_b, k, k_norm, weights);

  // Rotary dims come first in a head.
  Tensor rotate(const Tensor& x_THI, const RopeTable& table) const {
    const std::vector<Tensor> parts =
        split(x_THI, {c.rope_dim, c.head_dim - c.rope_dim});
    return concat({rope(parts[0], table), parts[1]});
  }
  IndexerStates project(const Tensor& x_TD, const Tensor& query_latent_TQ,
                        const RopeTable& table) const {
    const int64_t t = x_TD.size(0);
    const Tensor q_THI =
        rotate(reshape(q_b(query_latent_TQ), {t, c.heads, c.head_dim}), table);
    const Tensor k_TI =
        reshape(rotate(reshape(k_norm(k(x_TD)), {t, 1, c.head_dim}), table),
                {t, c.head_dim});
    // Weights are fp32 whatever the activations are.
    const Tensor w_TH = weights(x_TD);
    return {q_THI, k_TI,
            scale(cast(w_TH, accumulator_dtype(w_TH.dtype())),
                  1 / std::sqrt(static_cast<double>(c.heads)))};
  }
  DsaSelection select(const IndexerStates& s, const Sequence& sequence) const {
    return select_keys(s.query_THI.detach(), s.key_SI.detach(),
                       s.weight_TH.detach(), sequence, c.scale(), c.top_k);
  }
};

// What a selection is learned towards, if at all.
enum class IndexerTraining : uint8_t {
  kFrozen,
  kSelectedKeys,  // the main attention over the selected keys
  kAllKeys,       // over every key: finds what the selection misses, O(T^2)
};

struct AttentionOutput {
  Tensor hidden_TD;
  std::optional<DsaSelection> selected;
};

struct LatentAttention {
  MlaConfig c;
  IndexerConfig index_config;
  int layer = 0;
  bool sparse = true;  // over selected keys, else over all
  bool owns_indexer = false;
  IndexerTraining training = IndexerTraining::kFrozen;
  bool absorbed = true;       // form; with a cache always absorbed
  bool reuses_given = false;  // an owner takes a given selection over its own
  Mla mla{c};
  std::optional<Indexer> indexer = make_if<Indexer>(owns_indexer, index_config);
  FIELDS(mla, indexer);

  // A layer that owns an indexer selects once per micro-batch; the others use
  // their source's selection. A prediction layer that runs at several depths
  // reuses the first depth's.
  AttentionOutput operator()(const Tensor& x_TD,
                             const std::optional<DsaSelection>& shared,
                             Context& ctx) const;

 private:
  Tensor over_all_keys(const MlaStates& s, Context& ctx) const;
  Tensor over_selected_keys(const MlaStates& s, const DsaSelection& selected,
                            const std::optional<IndexerStates>& index,
                            Context& ctx) const;
};

}  // namespace tapeline
