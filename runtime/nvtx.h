// Ranges for Nsight Systems: a name from push to pop, on the calling thread.
// Without CUDA, and without a profiler attached, next to nothing happens.
#pragma once

namespace tapeline {

void nvtx_push(const char* name);
void nvtx_pop();

}  // namespace tapeline
