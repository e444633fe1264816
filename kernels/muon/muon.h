// Muon: momentum whose update is made nearly orthogonal (Jordan et al. 2024,
// kellerjordan.github.io/posts/muon; arXiv 2502.16982 for its scale).
//
//   momentum  m += (1 - beta) (g - m)        g = gradient_scale grad
//             u = nesterov ? g + beta (m - g) : m
//   orthogonalize, per matrix:  X = u / (|u|_F + 1e-7), then five times
//             S = X X^T,  X = (a I + b S + c S^2) X
//             a, b, c = 3.4445, -4.7750, 2.0315
//   apply     param = (1 - lr weight_decay) param - lr_scaled o
//
// The iteration runs on the smaller side (S = X^T X when M > N). It drives
// singular values not to 1 but between the quintic's local minimum and maximum,
// 0.682 and 1.203: the coefficients trade that for a steep slope at 0. A
// singular value under 3.4445^-5 |u|_F is still on its way after five. A zero
// update stays zero.
// lr_scaled = lr * muon_scale(kind, M, N); the scale depends on the shape, as
// an orthogonal matrix has elements of size 1 / sqrt(max(M, N)):
//   kMatchAdamW  0.2 sqrt(max(M, N))      as long per element as AdamW's
//   update,
//                so AdamW's learning rate and decay serve
//   kSpectral    sqrt(max(1, M / N))      Jordan's own; wants its own lr
//
// All arrays are contiguous, fp32 (fp64). update is [M, N], or [B, M, N] for B
// matrices apart (experts): the same bits as B calls. Deterministic for any
// number of threads. Compute-bound: per matrix of sides s <= l, 5 (4 l + 2 s)
// s^2 flops.
#pragma once

#include <cstdint>

#include "kernels/kernel.h"

namespace tapeline {

enum class MuonScale { kMatchAdamW, kSpectral };
double muon_scale(MuonScale kind, int64_t rows, int64_t columns);

// clip_1 as in adamw.h; if it is not finite, the update is zero and the
// momentum stays. muon_apply() decays without it: pass it there too.
template <class A>
void muon_momentum(Launch, View<const A> grad, View<A> momentum, double beta,
                   bool nesterov, View<A> update, double gradient_scale = 1,
                   View<const double> clip_1 = {});

// Elements of workspace that muon_orthogonalize needs for an update of this
// shape.
int64_t muon_workspace(const Shape& update);

// In place. Overwrites the workspace, [muon_workspace(update.shape)].
template <class A>
void muon_orthogonalize(Launch, View<A> update, View<A> workspace,
                        int iterations = 5);

template <class A>
void muon_apply(Launch, View<const A> update, double lr_scaled,
                double weight_decay, double lr, View<A> param,
                View<const double> clip_1 = {});

Cost muon_orthogonalize_cost(const Shape& update, int iterations = 5);

}  // namespace tapeline
