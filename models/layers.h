// Layers shared by all model families: structs of parameters with operator().
//
// Shape suffixes: T tokens, D model, F hidden, V vocabulary.
#pragma once

#include <cstdint>

#include "autograd/ops.h"
#include "runtime/parameter.h"
#include "runtime/tree.h"

namespace tapeline {

// An optional layer, made in place when the configuration wants it.
template <class L, class... Args>
std::optional<L> make_if(bool wanted, Args&&... args) {
  if (!wanted) return std::nullopt;
  return L{std::forward<Args>(args)...};
}

struct Linear {
  int64_t in = 0, out = 0;
  Parameter weight{{out, in}};
  FIELDS(weight);

  Tensor operator()(const Tensor& x_TD) const { return linear(x_TD, weight); }
};

struct RmsNorm {
  int64_t dim = 0;
  double eps = 1e-6;
  Parameter weight{{dim}, Initializer::constant(1)};
  FIELDS(weight);

  Tensor operator()(const Tensor& x) const { return rms_norm(x, weight, eps); }
};

struct LayerNorm {
  int64_t dim = 0;
  double eps = 1e-6;
  Parameter weight{{dim}, Initializer::constant(1)};
  Parameter bias{{dim}, Initializer::constant(0)};
  FIELDS(weight, bias);

  Tensor operator()(const Tensor& x) const {
    return layer_norm(x, weight, bias, eps);
  }
};

struct Embedding {
  int64_t vocabulary = 0, dim = 0;
  int64_t padding_id = -1;  // its row gets no gradient
  Parameter weight{{vocabulary, dim}};
  FIELDS(weight);

  Tensor operator()(const Tensor& ids_T) const {
    return embedding(ids_T, weight, padding_id);
  }
};

// down(silu(gate x) * up x); gate and up are one matrix, gate rows first.
struct SwigluFeedForward {
  int64_t dim = 0, hidden = 0;
  Parameter gate_up{{2 * hidden, dim}};
  Linear down{hidden, dim};
  FIELDS(gate_up, down);

  Tensor operator()(const Tensor& x_TD) const {
    return down(swiglu(linear(x_TD, gate_up)));
  }
};

}  // namespace tapeline
