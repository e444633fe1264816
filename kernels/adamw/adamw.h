// AdamW with decoupled weight decay (Loshchilov & Hutter 2019, arXiv
// 1711.05101; the arithmetic of torch.optim.AdamW).
//
//   g  = gradient_scale grad
//   m += (1 - beta1) (g - m)             v = beta2 v + (1 - beta2) g^2
//   param = (1 - lr weight_decay) param
//           - lr / (1 - beta1^step) m / (sqrt(v / (1 - beta2^step)) + eps)
//
// param, grad, m, v: equal shapes, contiguous, fp32 (fp64). step counts from 1.
// gradient_scale is the clip factor: the gradient itself is not rewritten.
// Where the host does not know it, clip_1 holds it, one element where the
// kernel runs (grad_norm.h); gradient_scale multiplies it. If it is not finite,
// nothing is written. Elementwise with every fused operation written out: the
// same bits for any number of threads and any way to cut the tensor. An element
// with g = 0 still decays, and so do its moments. Bandwidth-bound: reads four
// arrays and writes three.
#pragma once

#include <cstdint>

#include "kernels/kernel.h"

namespace tapeline {

struct AdamWOptions {
  double lr = 0;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0;
  int64_t step = 1;
  double gradient_scale = 1;
  View<const double> clip_1 = {};  // empty: none
};

template <class A>
void adamw(Launch, View<A> param, View<const A> grad, View<A> m, View<A> v,
           const AdamWOptions&);

inline Cost adamw_cost(int64_t elements) {
  return {.flops = 14.0 * elements, .bytes = 28.0 * elements};
}

}  // namespace tapeline
