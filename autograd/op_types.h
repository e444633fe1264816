// Values that ops.h takes and returns besides Tensor. Plain data, no math.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "runtime/tensor.h"
#include "runtime/tree.h"

namespace tapeline {

// Rows [begin, end) of each of `heads` equal row blocks of a weight.
struct HeadRows {
  int64_t heads = 1, begin = 0, end = 0;
  enum class Direction : uint8_t { kForward, kTransposed };
  Direction direction = Direction::kForward;
};

// --- Rotary embedding

struct RopeConfig {
  enum class Scaling : uint8_t { kDefault, kYarn, kLlama3 };
  double theta = 10000;
  int64_t dim = 0;
  bool interleaved = false;  // pairs (2j, 2j+1), else (j, j + dim/2)
  Scaling scaling = Scaling::kDefault;
  double factor = 1;
  double beta_fast = 32, beta_slow = 1;  // yarn
  double attention_factor = 1;           // yarn: scales cos and sin
  double softmax_factor = 1;             // yarn: for who scales the scores
  bool truncate = true;                  // yarn: whole-number bounds
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  int64_t original_max_position = 0;
};

// cos and sin of every token's angles, fp32 [T, dim/2].
struct RopeTable {
  Tensor cos_TR, sin_TR;
  bool interleaved = false;
};
RopeTable rope_table(const RopeConfig& config, const Tensor& position_T);

// --- Sparse attention

// Per key, the (token, slot) pairs that selected it: what makes the backward of
// sparse attention deterministic. Built on first use, shared by all layers that
// use one selection.
struct InvertedSelection {
  Tensor offsets_S1, entries;
};

// The keys each token attends to: int32 [T, K], ascending, -1 padded. One value
// made by a layer that owns an indexer and passed to the layers that share it.
struct DsaSelection {
  Tensor ids_TK;
  std::shared_ptr<InvertedSelection> inverse;
  FIELDS(ids_TK);
};

struct SparseAttention {
  Tensor o_THV;
  Tensor lse_TH;  // natural log; +inf for a token without keys
};

// What the indexer is trained towards: the main attention of its layer, used
// as constants.
struct AttentionTarget {
  Tensor q_THD, kv_SD, lse_TH;
  double scale = 1;
};

// --- Mixture of experts

struct RouterRule {
  bool sigmoid = true;  // else softmax
  int top_k = 1;
  int groups = 1, top_groups = 1;
  bool normalize = true;
  double scale = 1;
};

// Where each (token, slot) went: int32, sizes that depend on routing stay on
// the device.
struct Routing {
  Tensor offsets_E1;  // rows of expert e: [offsets[e], offsets[e + 1])
  Tensor row_TK;      // -1: nowhere
  Tensor token_R, slot_R;
  FIELDS(offsets_E1, row_TK, token_R, slot_R);
};

// Rows grouped by expert. Rows from offsets[E] on are not touched by any op.
struct Routed {
  Tensor data;
  Routing routing;
  FIELDS(data, routing);
};

// --- Losses

struct CrossEntropy {
  Tensor loss;          // one number, acc
  Tensor token_loss_T;  // acc, 0 where ignored; not differentiable
};

// How a token's expert probabilities enter the balance loss.
struct BalanceRule {
  enum class Kind : uint8_t {
    kSigmoid,        // s / sum s, without bias
    kSigmoidBiased,  // (s + b) / sum (s + b)
    kSoftmax,
  };
  Kind kind = Kind::kSigmoid;
};

}  // namespace tapeline
