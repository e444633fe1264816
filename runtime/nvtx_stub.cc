#include "runtime/nvtx.h"

namespace tapeline {

void nvtx_push(const char*) {}
void nvtx_pop() {}

}  // namespace tapeline
