// The CUDA side of elementwise.h: the same contracts, shapes already checked.
#pragma once

#include "kernels/kernel.h"

namespace tapeline::cuda {

template <class T>
void add(Launch l, View<const T> a, View<const T> b, View<T> y);
template <class T>
void mul(Launch l, View<const T> a, View<const T> b, View<T> y);
template <class T>
void accumulate(Launch l, View<const T> x, View<T> y);
template <class X, class Y>
void axpy(Launch l, double alpha, View<const X> x, View<Y> y);
template <class T>
void scale(Launch l, double alpha, View<const T> x, View<T> y);
template <class A, class B>
void cast(Launch l, View<const A> x, View<B> y);
template <class T>
void copy(Launch l, View<const T> x, View<T> y);
template <class T>
void fill(Launch l, double value, View<T> y);
template <class T>
void sum(Launch l, View<const T> x, View<Accumulator<T>> y);

}  // namespace tapeline::cuda
