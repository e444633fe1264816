// Routings and row widths that combine is tested with: dispatch's.
#pragma once

#include "kernels/dispatch/dispatch_cases.h"

namespace tapeline {

using CombineCase = DispatchCase;

inline std::vector<CombineCase> combine_cases() { return dispatch_cases(); }

}  // namespace tapeline
