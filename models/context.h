// Context: what a forward pass of one (stage, micro-batch) needs besides
// weights and activations. No process-global training state.
//
// Auxiliary losses are finished and injected in the layer that makes them
// (attach); each is weighted by numbers known before the step, so gradients are
// plain sums over micro-batches. Values for logs and expert counts are kept per
// global layer, once also where a layer is recomputed, and read after the step.
// A context lives until the backward of its micro-batch is done.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "autograd/checkpoint.h"
#include "autograd/offload.h"
#include "autograd/ops.h"
#include "autograd/sequence.h"
#include "runtime/tensor.h"

namespace tapeline {

// Factors of the auxiliary losses of this micro-batch: coefficient times this
// micro-batch's share of the step (its tokens / the step's tokens). 0: off.
struct AuxWeights {
  double balance = 0;
  double z = 0;
  double indexer = 0;  // coefficient / tokens of the step, per row
};

// Layers that route or select report here, keyed by global layer.
// One value per invocation of the layer in this micro-batch.
struct LayerStatistics {
  std::vector<Tensor> expert_counts_E;  // i64, valid tokens
  std::vector<Tensor> balance_loss, z_loss, indexer_loss;
};

// Keys and values of the tokens generated so far, one entry per layer and kind.
// Rows are appended; storage doubles when it is full.
class KvCache {
 public:
  // Appends rows and returns all rows so far.
  Tensor append(int layer, const std::string& kind, const Tensor& rows);
  int64_t tokens(int layer, const std::string& kind) const;

 private:
  struct Rows {
    Tensor data;
    int64_t used = 0;
  };
  std::map<std::pair<int, std::string>, Rows> rows_;
};

struct Context {
  Sequence sequence;
  RopeTable rope, index_rope;  // of sequence.position_T
  Tensor valid_T;              // u8, 0 at padding; undefined: all valid
  AuxWeights weights;
  bool count_experts = true;
  KvCache* cache = nullptr;  // decoding: keys of earlier tokens
  // Per global layer: made again in backward instead of saved. Empty: none.
  std::vector<bool> recompute;
  std::vector<std::string> keep;  // ops whose outputs recomputed layers keep
  // Outputs of norms are made again in backward where a layer is not.
  bool drop_norms = false;
  OffloadGraph* offload = nullptr;  // windows of this pass; null: none
  std::map<int, LayerStatistics> statistics;

  // Adds the balance and z loss of a router to the graph behind y, and its
  // expert counts to the statistics.
  Tensor attach_router(const Tensor& y, int layer, const Tensor& logits_TE,
                       const Tensor& bias_E, const Tensor& expert_TK,
                       const BalanceRule& rule);
  // Adds the indexer's loss behind y.
  Tensor attach_indexer(const Tensor& y, int layer, const Tensor& loss);
  RecomputePolicy policy(int layer) const {
    const auto at = static_cast<size_t>(layer);
    return {at < recompute.size() && recompute[at], keep};
  }
  // Rows of this call, or with a cache, of all calls so far.
  Tensor cached(int layer, const std::string& kind, const Tensor& rows);
  // Per-token weight of the indexer's loss: weights.indexer on valid tokens.
  Tensor indexer_row_weight(DType dtype) const;
};

}  // namespace tapeline
