// Configuration of glm_moe_dsa models, read from and written to Hugging Face
// config.json keys.
//
// Keys that have no effect here are kept and written back. Contradictions are
// errors that name both values. Precedence: indexer_types over
// index_topk_pattern over index_topk_freq and index_skip_topk_offset;
// mlp_layer_types over first_k_dense_replace. `head_dim` is ignored: files
// carry values that mean other things.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "models/mla.h"
#include "models/moe.h"
#include "runtime/json.h"

namespace tapeline {

struct GlmConfig {
  int64_t vocabulary = 154880, dim = 6144, layers = 78;
  int64_t dense_hidden = 12288, expert_hidden = 2048;
  int64_t heads = 64, query_rank = 2048, latent_rank = 512;
  int64_t nope_dim = 192, rope_dim = 64, value_dim = 256;
  double eps = 1e-5;
  RopeConfig rope, index_rope;
  int64_t index_heads = 32, index_dim = 128;
  int index_top_k = 2048;
  // Per layer, MTP layers behind the others: owns an indexer (else it uses the
  // nearest owner's selection); has a dense feed-forward (else experts).
  std::vector<bool> full_index, dense;
  bool share_index_across_mtp = true;
  int64_t experts = 256, experts_per_token = 8, shared_experts = 1;
  int groups = 1, top_groups = 1;
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
  bool train_indexer = false;   // by its KL loss; else frozen
  bool absorbed = true;         // form of attention
  BalanceRule balance;

  static absl::StatusOr<GlmConfig> parse(const Json& json);

  int total_layers() const { return static_cast<int>(layers) + mtp_layers; }
  MlaConfig mla() const;
  MoeConfig moe() const;
};

}  // namespace tapeline
