// What both ways of the embedding's gradient share.
#pragma once

#include "kernels/cuda_rows.cuh"

namespace tapeline::cuda {

// Whether rows of dy and of the sums they are added to may be taken by packs. A
// pack of dy meets as many sums, which are wider: their rows must start on a
// pack of that size.
template <class T>
bool packable_onto(const View<const T>& dy, const View<Accumulator<T>>& sums) {
  constexpr int kN = Pack<T>::kSize;
  return packable(dy) && packable(View<const Accumulator<T>>(sums)) &&
         reinterpret_cast<uintptr_t>(sums.data) %
                 (kN * sizeof(Accumulator<T>)) ==
             0 &&
         (sums.size(0) <= 1 || sums.strides[0] % kN == 0);
}

}  // namespace tapeline::cuda
