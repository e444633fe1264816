#include "kernels/cuda_dispatch.h"
#include "kernels/simd_math.h"
#include "kernels/swiglu/swiglu.h"
#include "kernels/swiglu/swiglu_cuda.h"

namespace tapeline {
namespace {

template <class First, class... Rest>
void check(const char* op, const First& first, const Rest&... rest) {
  const bool same = first.rank() == 2 && ((rest.shape == first.shape) && ...);
  CHECK(same) << "[" << op << "] shapes: " << describe(first)
              << ((", " + describe(rest)) + ...);
  CHECK(dense_rows(first) && (dense_rows(rest) && ...))
      << "[" << op << "] last strides: " << describe(first)
      << ((", " + describe(rest)) + ...);
}

int64_t row_count(const char* op, int64_t capacity,
                  const View<const int32_t>& rows) {
  if (!rows) return capacity;
  const int64_t count = rows(rows.size(0) - 1);
  CHECK(count >= 0 && count <= capacity)
      << "[" << op << "] " << count << " rows of " << capacity;
  return count;
}

}  // namespace

template <class T>
void swiglu_forward(Launch l, View<const T> gate, View<const T> up, View<T> y,
                    View<const int32_t> rows) {
  if (l.dry) return;
  check("swiglu_forward", gate, up, y);
  if (kCuda && l.on_cuda()) {
    return cuda::swiglu_forward(l, gate, up, y, rows);
  }
  const int64_t f = gate.size(1);
  l.threads->parallel_for(row_count("swiglu_forward", gate.size(0), rows),
                          rows_per_chunk(f), [&](int64_t begin, int64_t end) {
                            for (int64_t i = begin; i < end; ++i) {
                              const T *g = &gate(i, 0), *u = &up(i, 0);
                              T* out = &y(i, 0);
#pragma omp simd
                              for (int64_t j = 0; j < f; ++j) {
                                T gated;
                                store(gated, silu(load(g[j])));
                                store(out[j], load(gated) * load(u[j]));
                              }
                            }
                          });
}

template <class T>
void swiglu_backward(Launch l, View<const T> dy, View<const T> gate,
                     View<const T> up, View<T> dgate, View<T> dup,
                     View<const int32_t> rows) {
  if (l.dry) return;
  using A = Accumulator<T>;
  check("swiglu_backward", dy, gate, up, dgate, dup);
  if (kCuda && l.on_cuda()) {
    return cuda::swiglu_backward(l, dy, gate, up, dgate, dup, rows);
  }
  const int64_t f = gate.size(1);
  l.threads->parallel_for(
      row_count("swiglu_backward", gate.size(0), rows), rows_per_chunk(f),
      [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const T *d = &dy(i, 0), *g = &gate(i, 0), *u = &up(i, 0);
          T *dg = &dgate(i, 0), *du = &dup(i, 0);
#pragma omp simd
          for (int64_t j = 0; j < f; ++j) {
            const A gj = load(g[j]), uj = load(u[j]), dj = load(d[j]);
            const A s = sigmoid(gj);
            store(dg[j], dj * uj * s * (1 + gj * (1 - s)));
            store(du[j], dj * (gj * s));
          }
        }
      });
}

// exp counted as one.
Cost swiglu_forward_cost(int64_t rows, int64_t f, int64_t element_bytes) {
  return {.flops = 4.0 * rows * f, .bytes = 3.0 * rows * f * element_bytes};
}
Cost swiglu_backward_cost(int64_t rows, int64_t f, int64_t element_bytes) {
  return {.flops = 10.0 * rows * f, .bytes = 5.0 * rows * f * element_bytes};
}

#define TAPELINE_SWIGLU(T)                                                    \
  template void swiglu_forward(Launch, View<const T>, View<const T>, View<T>, \
                               View<const int32_t>);                          \
  template void swiglu_backward(Launch, View<const T>, View<const T>,         \
                                View<const T>, View<T>, View<T>,              \
                                View<const int32_t>);
TAPELINE_SWIGLU(float)
TAPELINE_SWIGLU(bf16)
TAPELINE_SWIGLU(double)
#undef TAPELINE_SWIGLU

}  // namespace tapeline
