// y = T(silu(gate)) * up,   silu(g) = g * s,  s = 1 / (1 + exp(-g))
//
//   gate, up, y, dy, dgate, dup [R, F] T in {float, bf16, double}
//   backward, overwriting:  dgate = dy * up * s * (1 + g * (1 - s))
//                           dup   = dy * silu(g)
// Rows have last stride 1 and any distance, so gate and up may be the halves of
// one [R, 2F] tensor, and dgate and dup those of its gradient. dgate may be
// gate and dup may be up, exactly. Arithmetic in Accumulator<T>; silu(gate) is
// rounded to T before the product, as transformers does, and gradients take
// that for the identity. Shazeer 2020. With `rows`, whose last element is a
// count (the offsets of routed rows end in it), rows from that count on are
// neither read nor written. Memory-bound on a GPU, bound by exp on a CPU.
#pragma once

#include "kernels/kernel.h"

namespace tapeline {

template <class T>
void swiglu_forward(Launch l, View<const T> gate, View<const T> up, View<T> y,
                    View<const int32_t> rows = {});

template <class T>
void swiglu_backward(Launch l, View<const T> dy, View<const T> gate,
                     View<const T> up, View<T> dgate, View<T> dup,
                     View<const int32_t> rows = {});

Cost swiglu_forward_cost(int64_t rows, int64_t f, int64_t element_bytes);
Cost swiglu_backward_cost(int64_t rows, int64_t f, int64_t element_bytes);

}  // namespace tapeline
