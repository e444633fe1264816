// How long queued launches take on a GPU. In a CUDA build alone: callers ask
// for it behind kCuda && on_cuda().
#pragma once

#include <functional>

#include "kernels/kernel.h"

namespace tapeline::cuda {

// Seconds between two events around what `queue` queues on the launch's stream.
// With `busy` above 0 a kernel occupies the stream for that many seconds first:
// when it ends, everything is queued, and the host's time does not show. Waits
// for the end.
double time_on_gpu(Launch l, double busy, const std::function<void()>& queue);

// For a profiler that was told to wait: what is launched between the two calls.
void profile_from_here();
void profile_to_here();

}  // namespace tapeline::cuda
