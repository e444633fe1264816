// Configuration of language models with latent attention and mixtures of
// experts, read from and written to Hugging Face config.json keys.
//
// A family gives the values of absent keys. Keys that have no effect here are
// kept and written back. Contradictions are errors that name both values.
// Precedence: indexer_types over index_topk_pattern over index_topk_freq and
// index_skip_topk_offset; mlp_layer_types over first_k_dense_replace.
// `head_dim` is ignored: files carry values that mean other things.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "models/latent_attention.h"
#include "models/moe.h"
#include "runtime/json.h"

namespace tapeline {

struct MlaLmConfig {
  int64_t vocabulary = 0, dim = 0, layers = 0;
  int64_t dense_hidden = 0, expert_hidden = 0, first_dense = 3;
  int64_t heads = 0, query_rank = 0, latent_rank = 0;
  int64_t nope_dim = 0, rope_dim = 0, value_dim = 0;
  double eps = 1e-5;
  RopeConfig rope, index_rope;
  bool sparse = true;  // attention over selected keys
  int64_t index_heads = 0, index_dim = 0;
  int index_top_k = 0;
  int64_t index_offset = 2;  // index_skip_topk_offset
  // Per layer, MTP layers behind the others: owns an indexer (else it uses the
  // nearest owner's selection); has a dense feed-forward (else experts).
  std::vector<bool> full_index, dense;
  bool share_index_across_mtp = true;
  int64_t experts = 0, experts_per_token = 0, shared_experts = 1;
  int64_t groups = 1, top_groups = 1;
  bool normalize_weights = true;
  double routed_scale = 2.5;
  int mtp_layers = 0;
  bool tied_head = false;
  double initializer_std = 0.02;
  int64_t padding_id = -1;
  std::vector<int64_t> eos_ids;
  Json hf;  // every key as read

  // Choices of a run, not of a file.
  int mtp_depths = 0;           // <= mtp_layers, or any with one layer
  bool mtp_after_norm = false;  // hidden state given to depth 1
  IndexerTraining indexer_training = IndexerTraining::kFrozen;
  bool absorbed = true;  // form of attention
  BalanceRule balance;

  // What families share; `defaults` holds what absent keys mean.
  static absl::StatusOr<MlaLmConfig> parse_shared(const Json& json,
                                                  MlaLmConfig defaults);

  int total_layers() const { return static_cast<int>(layers) + mtp_layers; }
  MlaConfig mla() const;
  MoeConfig moe() const;
};

}  // namespace tapeline
