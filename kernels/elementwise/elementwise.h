// One output element from the elements at the same place; casts, copies, sums.
//
// T in {float, bf16, double}. Arithmetic is in Accumulator<T>, each result
// rounded to its dtype once. Operands of a call have the same shape (CHECK) and
// any strides, 0 included for inputs; rank at most 4. An output may be one of
// the inputs, exactly; it may not overlap one otherwise. Memory-bound: every
// operand is read or written once. Fast when dense: dimensions that are
// contiguous in all operands are joined before the loop.
#pragma once

#include "kernels/kernel.h"

namespace tapeline {

// y = a + b
template <class T>
void add(Launch l, View<const T> a, View<const T> b, View<T> y);

// y = a * b
template <class T>
void mul(Launch l, View<const T> a, View<const T> b, View<T> y);

// y += x, rounded to T after the addition: how activation gradients add up.
template <class T>
void accumulate(Launch l, View<const T> x, View<T> y);

// y += alpha * x, fused. X and Y in {float, bf16, double}; bf16 into float is
// how a gradient reaches an fp32 sink.
template <class X, class Y>
void axpy(Launch l, double alpha, View<const X> x, View<Y> y);

// y = alpha * x
template <class T>
void scale(Launch l, double alpha, View<const T> x, View<T> y);

// y = x in another dtype, rounded to nearest even; to bf16 from double by way
// of float. Also between i32 and i64 (CHECK that a value fits is the caller's).
template <class A, class B>
void cast(Launch l, View<const A> x, View<B> y);

// y = x, for float, bf16, double, int32_t, int64_t, uint8_t. x and y may differ
// in strides: this is how a transposed view becomes contiguous.
template <class T>
void copy(Launch l, View<const T> x, View<T> y);

// y = value everywhere, for the dtypes of copy.
template <class T>
void fill(Launch l, double value, View<T> y);

// y[0] = sum of x; y has one element. x's rows are added in order within at
// most kSumChunks chunks cut from the shape alone, then the chunks in order.
inline constexpr int kSumChunks = 256;
template <class T>
void sum(Launch l, View<const T> x, View<Accumulator<T>> y);

}  // namespace tapeline
