// For <op>_cpu.cc files alone: whether <op>.cu is linked in.
//
//   if (kCuda && l.on_cuda()) return cuda::rms_norm_forward(l, ...);
//   // what follows is the reference, on the CPU
//
// The public function checks shapes, then goes one of the two ways. A kernel
// without a .cu file says CHECK(!l.on_cuda()) instead: nothing runs on another
// device in silence. Each file sees its own constant, so no header's objects
// differ between builds with and without CUDA.
#pragma once

namespace tapeline {

#ifdef TAPELINE_CUDA
constexpr bool kCuda = true;
#else
constexpr bool kCuda = false;
#endif

}  // namespace tapeline
