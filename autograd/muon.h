// Muon: momentum, made orthogonal matrix by matrix (Jordan et al. 2024,
// kellerjordan.github.io/posts/muon).
//
//   b = mu b + (1 - mu) g           g the clipped gradient
//   u = (1 - mu) g + mu b           nesterov; else u = b
//   o = orthogonalize(u)            singular values near 1 (kernels/muon)
//   w = (1 - lr decay) w - lr 0.2 sqrt(max(rows, columns)) o
//
// The factor makes the update as long, per element, as AdamW's (arXiv
// 2502.16982), so one learning rate serves both. A tensor is cut into row
// blocks and each is a matrix of its own: heads of an attention projection do
// not mix, nor do its parts with and without rotary position.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "autograd/adamw.h"
#include "runtime/tensor.h"

namespace tapeline {

struct MuonRule {
  double momentum = 0.95;
  bool nesterov = true;
  int iterations = 5;
  double weight_decay = 0.1;
  double lr_ratio = 1;  // of this rule's learning rate to the step's
};

// Row blocks [begin, end) of a matrix with `rows` rows: `heights` repeated
// until all rows are used; CHECKs that they end together.
struct RowBlock {
  int64_t begin = 0, end = 0;
};
std::vector<RowBlock> row_blocks(const std::vector<int64_t>& heights,
                                 int64_t rows);

// A matrix to update: contiguous [rows, columns], all f32 or all f64.
struct MuonMatrix {
  Tensor param, grad, momentum;
};

// Updates all of them; many small matrices share the threads. The same bits for
// any number of threads and any order of the list.
void muon_update(const MuonRule& rule, const UpdateStep& step,
                 std::span<const MuonMatrix> matrices);

}  // namespace tapeline
