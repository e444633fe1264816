// How close a discrete choice was: what goldens call margins.
#pragma once

#include "autograd/op_types.h"
#include "tools/parity/values.h"

namespace tapeline {

// Per row of scores_TS, the top_k-th largest minus the next; +inf where one of
// them is not finite. With top_k >= S the next is the smallest.
Values index_margin(const Values& scores_TS, int64_t top_k);

// Per row, the smallest score + bias that was chosen minus the largest that
// was not; with groups no more than the same of group scores; +inf if all
// experts are chosen. bias may be empty.
Values router_margin(const Values& logits_TE, const std::vector<double>& bias,
                     const RouterRule& rule);

}  // namespace tapeline
