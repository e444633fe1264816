#include "runtime/nvtx.h"

#include <nvtx3/nvToolsExt.h>

namespace tapeline {

void nvtx_push(const char* name) { nvtxRangePushA(name); }
void nvtx_pop() { nvtxRangePop(); }

}  // namespace tapeline
