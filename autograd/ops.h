// Every op a model may call: the page users read.
//
// Ops take tensors and return tensors; shapes and dtypes are CHECKed with the
// op's name. Activations are f32, bf16 or f64 and keep their dtype; statistics,
// routing weights and losses are f32 (f64 beside f64), written `acc` below.
// Outputs are fresh; inputs are never written.
//
// Shape suffixes: T tokens, S keys, D model, N out features, H heads, G key
// heads, L latent rank, R rotary dims or routed rows, K selected ids or experts
// per token, E experts, F expert hidden, V vocabulary or value dims.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "autograd/op_types.h"
#include "autograd/sequence.h"
#include "autograd/tape.h"
#include "runtime/parameter.h"
#include "runtime/tensor.h"

namespace tapeline {

// Ops whose outputs a checkpoint can keep (RecomputePolicy), by name.
const std::vector<std::string>& keepable_ops();

// --- Arithmetic -------------------------------------------------------------

// y = a + b, same shape.
Tensor add(const Tensor& a, const Tensor& b);
inline Tensor operator+(const Tensor& a, const Tensor& b) { return add(a, b); }
// y = a * b elementwise, same shape.
Tensor mul(const Tensor& a, const Tensor& b);
// y = factor * x.
Tensor scale(const Tensor& x, double factor);
// y[1] = sum of all elements, acc.
Tensor sum(const Tensor& x);
// y = x in another float dtype; the gradient comes back in x's.
Tensor cast(const Tensor& x, DType dtype);
// y = x; backward also gives `loss` (one number) the gradient `factor`: an
// auxiliary loss enters where it was computed and the main loss never sees it.
Tensor attach(const Tensor& x, const Tensor& loss, double factor);

// --- Shape ------------------------------------------------------------------

// The same elements in row-major order under another shape.
Tensor reshape(const Tensor& x, const Shape& shape);
// Views of the parts of the last dimension; sizes add up to it.
std::vector<Tensor> split(const Tensor& x, const std::vector<int64_t>& sizes);
// The parts side by side along the last dimension.
Tensor concat(const std::vector<Tensor>& parts);
// x_TR seen by every head: a view y_THR; its gradient sums over heads.
Tensor expand_heads(const Tensor& x_TR, int64_t heads);

// --- Dense layers -----------------------------------------------------------

// y_TN = x_TD w_ND^T.
Tensor linear(const Tensor& x_TD, const Parameter& w_ND);
// The same product in acc, whatever x's dtype: logits_TE of a router.
Tensor router_logits(const Tensor& x_TD, const Parameter& w_ED);
// Per head h, with W[h] = rows [begin, end) of the h-th of `heads` equal row
// blocks of w: y[t,h] = W[h] x[t,h] (kForward), or W[h]^T x[t,h] (kTransposed).
// Multi-head latent attention absorbs kv_b_proj into query and output with it.
Tensor head_linear(const Tensor& x_THA, const Parameter& w, HeadRows rows);
// y = x / sqrt(mean(x^2) + eps) * w over the last dimension.
Tensor rms_norm(const Tensor& x, const Parameter& w_D, double eps);
// y = (x - mean) / sqrt(var + eps) * w + b over the last dimension.
Tensor layer_norm(const Tensor& x, const Parameter& w_D, const Parameter& b_D,
                  double eps);
// y_TF = silu(gate) * up with [gate | up] = x along the last dimension.
Tensor swiglu(const Tensor& x_T2F);
// y_TD = table[ids]; the padding row gets no gradient.
Tensor embedding(const Tensor& ids_T, const Parameter& table_VD,
                 int64_t padding_id = -1);

// --- Attention --------------------------------------------------------------

// Rotates by position; pairs are (2j, 2j+1) or (j, j + R/2) in x, and the
// output is always [all first | all second] elements.
Tensor rope(const Tensor& x_THR, const RopeTable& table);
// Dense causal attention in each sequence; H a multiple of G. o_THV.
Tensor attention(const Tensor& q_THD, const Tensor& k_SGD, const Tensor& v_SGV,
                 const Sequence& sequence, double scale);
// The `top_k` keys each token may see with the largest
//   sum_h w[t,h] relu(q[t,h] . k[s] * scale);
// ties go to the lower key. Not differentiable.
DsaSelection select_keys(const Tensor& q_THD, const Tensor& k_SD,
                         const Tensor& w_TH, const Sequence& sequence,
                         double scale, int top_k);
// Every key a token may see, as a selection; at most 8192 of them. Not
// differentiable.
DsaSelection select_all_keys(const Sequence& sequence);
// Attention over the selected keys with one key head: o_THV, values are the
// first `value_dim` elements of kv. lse_TH is not differentiable.
SparseAttention sparse_attention(const Tensor& q_THD, const Tensor& kv_SD,
                                 const DsaSelection& selection, double scale,
                                 int64_t value_dim);
// sum_t row_weight[t] KL(p_t || softmax of the indexer's scores) over the
// selected keys, p the head-averaged attention, a constant. Gradients go to the
// indexer's q, k and w alone. One number, acc.
Tensor indexer_loss(const Tensor& q_index_THD, const Tensor& k_index_SD,
                    const Tensor& w_TH, double index_scale,
                    const AttentionTarget& target,
                    const DsaSelection& selection, const Tensor& row_weight_T);

// --- Mixture of experts -----------------------------------------------------

// The experts of each token by score + bias (bias may be undefined). Not
// differentiable.
Tensor choose_experts(const Tensor& logits_TE, const Tensor& bias_E,
                      const RouterRule& rule);
// Combine weights of the chosen experts, from the scores without bias.
Tensor router_weights(const Tensor& logits_TE, const Tensor& expert_TK,
                      const RouterRule& rule);
// Rows of x grouped by expert, in token order within an expert.
Routed dispatch(const Tensor& x_TD, const Tensor& expert_TK, int64_t experts);
// y_RF = x_RD w[e]^T for the rows of expert e.
Routed grouped_linear(const Routed& x_R, const Parameter& w_EFD);
// silu(gate) * up on routed rows, [gate | up] along the last dimension.
Routed routed_swiglu(const Routed& x_R2F);
// y[t] = sum_k weight[t,k] x[row(t,k)] in k order.
Tensor combine(const Routed& x_R, const Tensor& weight_TK);

// --- Losses -----------------------------------------------------------------

// loss = sum_t weight[t] * CE(x_TD w_VD^T, label[t]); label -100 is ignored.
// weight is a constant, acc. Logits are made in chunks of tokens, and their
// gradient for dloss = 1 along with the loss where it is recorded: a dloss that
// is not exactly 1 multiplies it on the way back and rounds it again, so
// coefficients belong into weight.
CrossEntropy linear_cross_entropy(const Tensor& x_TD, const Parameter& w_VD,
                                  const Tensor& label_T,
                                  const Tensor& weight_T);
// mean-balanced load is 1: E sum_e f[e] mean_t p[t,e], f the share of
// assignments that went to e, a constant. valid_T (u8, may be undefined) is 0
// at padding, which counts nowhere. bias_E is read by kSigmoidBiased alone.
Tensor balance_loss(const Tensor& logits_TE, const Tensor& bias_E,
                    const Tensor& expert_TK, const Tensor& valid_T,
                    const BalanceRule& rule);
// mean_t logsumexp_e(logits[t])^2 over valid tokens.
Tensor z_loss(const Tensor& logits_TE, const Tensor& valid_T);
// Assignments per expert of the valid tokens, i64. Not differentiable.
Tensor count_experts(const Tensor& expert_TK, const Tensor& valid_T,
                     int64_t experts);

}  // namespace tapeline
