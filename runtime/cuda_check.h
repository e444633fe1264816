// For files that see CUDA's headers: a call that must not fail. Errors of the
// device are sticky, so whoever meets one stops.
#pragma once

#include <cuda_runtime.h>

#include "runtime/check.h"

#define CUDA_CHECK(call)                                         \
  do {                                                           \
    const cudaError_t cuda_error = (call);                       \
    CHECK(cuda_error == cudaSuccess)                             \
        << #call << ": " << cudaGetErrorName(cuda_error) << ", " \
        << cudaGetErrorString(cuda_error);                       \
  } while (false)
