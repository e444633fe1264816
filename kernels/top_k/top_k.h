// The k largest scores of each row, as key ids in ascending order.
//
//   scores [N, S]  S in {f32, f64}   ids [N, k] i32
//
// A row's candidates are its keys begin <= s < end (all of them when `range` is
// empty) whose score is not -inf. The k largest are taken, of equal ones the
// lowest ids; a NaN counts as smaller than every number, so it is taken only
// when numbers run out; -0 equals 0. The ids of a row ascend and are followed
// by -1 where there are fewer than k candidates; k may exceed S. Scores outside
// of the range are not read. The last strides are 1. Overwrites ids. Rows are
// independent, so the number of threads changes nothing.
//
// Method: with ~20 counting passes over a row, bisect the k-th largest value in
// the order of its bits; one more pass emits. No scratch, no sorting. On CUDA a
// counting pass finds eight bits at once.
#pragma once

#include "kernels/attention/key_range.h"
#include "kernels/kernel.h"

namespace tapeline {

template <class S>
void top_k(Launch l, View<const S> scores_NS, KeyRange range, int k,
           View<int32_t> ids_NK);

}  // namespace tapeline
