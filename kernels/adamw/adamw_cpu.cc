#include <cmath>

#include "kernels/adamw/adamw.h"
#include "kernels/adamw/adamw_cuda.h"
#include "kernels/cuda_dispatch.h"

namespace tapeline {
namespace {

// By value into the loop: through a reference, every store to an array could
// change them.
template <class A>
struct Factors {
  A gradient, decay, new_m, old_v, new_v, rate, v_scale, eps;
};

template <class A>
void update(int64_t n, Factors<A> f, A* param, const A* grad, A* m, A* v) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const A g = f.gradient * grad[i];
    m[i] = std::fma(f.new_m, g - m[i], m[i]);
    v[i] = std::fma(f.new_v * g, g, f.old_v * v[i]);
    const A size = std::fma(std::sqrt(v[i]), f.v_scale, f.eps);
    param[i] = std::fma(-f.rate, m[i] / size, f.decay * param[i]);
  }
}

}  // namespace

template <class A>
void adamw(Launch l, View<A> param, View<const A> grad, View<A> m, View<A> v,
           const AdamWOptions& o) {
  if (l.dry) return;
  CHECK(grad.shape == param.shape && m.shape == param.shape &&
        v.shape == param.shape && param.contiguous() && grad.contiguous() &&
        m.contiguous() && v.contiguous())
      << "[adamw] needs contiguous arrays of one shape: param is "
      << describe(param) << ", grad is " << describe(grad) << ", m is "
      << describe(m) << ", v is " << describe(v);
  CHECK_GE(o.step, 1) << "[adamw] steps count from 1";
  if (kCuda && l.on_cuda()) {
    return cuda::adamw(l, param, grad, m, v, o);
  }
  const double clip = o.clip_1 ? *o.clip_1.data : 1;
  if (!std::isfinite(clip)) return;
  // In f64: 1 - beta2^step has few good bits in f32 at step 1.
  const double step = static_cast<double>(o.step);
  const Factors<A> f = {
      .gradient = A(o.gradient_scale * clip),
      .decay = A(1 - o.lr * o.weight_decay),
      .new_m = A(1 - o.beta1),
      .old_v = A(o.beta2),
      .new_v = A(1 - o.beta2),
      .rate = A(o.lr / (1 - std::pow(o.beta1, step))),
      .v_scale = A(1 / std::sqrt(1 - std::pow(o.beta2, step))),
      .eps = A(o.eps),
  };
  l.threads->parallel_for(
      param.elements(), rows_per_chunk(1), [&](int64_t begin, int64_t end) {
        update(end - begin, f, param.data + begin, grad.data + begin,
               m.data + begin, v.data + begin);
      });
}

template void adamw(Launch, View<float>, View<const float>, View<float>,
                    View<float>, const AdamWOptions&);
template void adamw(Launch, View<double>, View<const double>, View<double>,
                    View<double>, const AdamWOptions&);

}  // namespace tapeline
