// y[t] = table[ids[t]]
//
//   ids [T] int32, each in [0, V) (CHECK on the CPU)
//   table [V, D], y, dy [T, D] T
//   dtable [V, D] Accumulator<T>
//   backward  dtable[ids[t]] += dy[t] in order of tokens; nothing for tokens of
//             padding_id. Accumulates.
// T in {float, bf16, double}. Rows have last stride 1; outputs overlap no
// input. Memory-bound: reads and writes T rows.
#pragma once

#include <cstddef>

#include "kernels/kernel.h"

namespace tapeline {

template <class T>
void embedding_forward(Launch l, View<const int32_t> ids_T,
                       View<const T> table_VD, View<T> y_TD);

// `workspace` is aligned to 16 bytes; without one, a GPU looks through all ids
// for each token.
template <class T>
void embedding_backward(Launch l, View<const int32_t> ids_T,
                        View<const T> dy_TD, View<Accumulator<T>> dtable_VD,
                        int64_t padding_id = -1,
                        std::byte* workspace = nullptr);
// May be 0.
size_t embedding_backward_workspace_bytes(const Launch& l, int64_t tokens,
                                          int64_t vocabulary);

}  // namespace tapeline
