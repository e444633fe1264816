// The CUDA side of adamw.h: the same contracts, shapes already checked.
#pragma once

#include "kernels/adamw/adamw.h"

namespace tapeline::cuda {

template <class A>
void adamw(Launch, View<A> param, View<const A> grad, View<A> m, View<A> v,
           const AdamWOptions&);

}  // namespace tapeline::cuda
