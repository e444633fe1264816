// Batch: the tokens and targets of one micro-batch, as the losses want them.
//
// Labels are shifted before packing: label[t] is the token after t in the same
// sequence, -100 where there is none. Multi-token prediction at depth d shifts
// ids and labels left by d once more, within each sequence. Every weight is
// known before the step: 1 / (valid labels of that loss in the whole step), so
// gradients of micro-batches are summed and nothing is divided afterwards.
#pragma once

#include <cstdint>
#include <vector>

#include "models/context.h"
#include "runtime/tensor.h"

namespace tapeline {

struct HostBatch {
  std::vector<int32_t> ids, labels;  // [T]
  std::vector<int32_t> cu_seqlens;   // 0 .. T
};

// Valid labels per loss over all micro-batches of a step.
struct Denominators {
  int64_t tokens = 0;
  int64_t lm = 0;
  std::vector<int64_t> mtp;  // by depth
};
Denominators count_targets(const std::vector<HostBatch>& batches,
                           int mtp_depths);

// Inputs of one prediction depth beyond the next token.
struct MtpTargets {
  Tensor ids_T, label_T, weight_T;
};

struct Batch {
  Tensor ids_T, label_T, weight_T;
  std::vector<MtpTargets> mtp;
  std::vector<int32_t> cu_seqlens;
  int64_t tokens = 0;
};

// weight dtype: accumulator_dtype of the model's. mtp_weight is the factor of
// the mean over depths.
Batch make_batch(const HostBatch& host, const Denominators& n,
                 double mtp_weight, DType weight_dtype);

// What a language model's forward pass returns: `total` is the one to run
// backward from; auxiliary losses enter on the way (Context::attach_*).
struct LanguageModelLoss {
  Tensor total;
  Tensor lm;                // weighted sum over this micro-batch
  std::vector<Tensor> mtp;  // weighted, by depth
};

}  // namespace tapeline
