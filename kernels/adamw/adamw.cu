#include <cmath>

#include "kernels/adamw/adamw_cuda.h"
#include "kernels/cuda_rows.cuh"

namespace tapeline::cuda {
namespace {

constexpr int kThreads = 256;

template <class A>
struct Factors {
  A gradient, decay, new_m, old_v, new_v, rate, v_scale, eps;
};

// As the reference has it, operation by operation: compiled without contraction
// it gives the same bits.
template <bool kWhole, class A>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(int64_t n, Factors<A> f, double scale, const double* clip,
                 A* param, const A* grad, A* m, A* v) {
  constexpr int kN = Pack<A>::kSize;
  if (clip != nullptr) {
    if (!isfinite(*clip)) return;
    f.gradient = A(scale * *clip);
  }
  const int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (j * kN >= n) return;
  const Pack<A> g_pack = load_pack<kWhole, kN>(grad, j, n);
  Pack<A> p_pack = load_pack<kWhole, kN>(param, j, n);
  Pack<A> m_pack = load_pack<kWhole, kN>(m, j, n);
  Pack<A> v_pack = load_pack<kWhole, kN>(v, j, n);
#pragma unroll
  for (int e = 0; e < kN; ++e) {
    A &pe = p_pack.at[e], &me = m_pack.at[e], &ve = v_pack.at[e];
    const A g = f.gradient * g_pack.at[e];
    me = fma(f.new_m, g - me, me);
    ve = fma(f.new_v * g, g, f.old_v * ve);
    const A size = fma(sqrt(ve), f.v_scale, f.eps);
    pe = fma(-f.rate, me / size, f.decay * pe);
  }
  store_pack<kWhole>(param, j, n, p_pack);
  store_pack<kWhole>(m, j, n, m_pack);
  store_pack<kWhole>(v, j, n, v_pack);
}

}  // namespace

template <class A>
void adamw(Launch l, View<A> param, View<const A> grad, View<A> m, View<A> v,
           const AdamWOptions& o) {
  const double step = static_cast<double>(o.step);
  const Factors<A> f = {
      .gradient = A(o.gradient_scale),
      .decay = A(1 - o.lr * o.weight_decay),
      .new_m = A(1 - o.beta1),
      .old_v = A(o.beta2),
      .new_v = A(1 - o.beta2),
      .rate = A(o.lr / (1 - std::pow(o.beta1, step))),
      .v_scale = A(1 / std::sqrt(1 - std::pow(o.beta2, step))),
      .eps = A(o.eps),
  };
  const int64_t n = param.elements();
  const auto blocks =
      static_cast<unsigned>(ceil_div(n, kThreads * Pack<A>::kSize));
  if (blocks == 0) return;
  const auto run = [&]<bool kWhole>() {
    adamw_kernel<kWhole><<<blocks, kThreads, 0, stream_of(l)>>>(
        n, f, o.gradient_scale, o.clip_1.data, param.data, grad.data, m.data,
        v.data);
  };
  const Shape flat{n};  // as one row
  by_alignment(run, View<const A>(param.data, flat),
               View<const A>(grad.data, flat), View<const A>(m.data, flat),
               View<const A>(v.data, flat));
  check_launch("adamw");
}

template void adamw(Launch, View<float>, View<const float>, View<float>,
                    View<float>, const AdamWOptions&);
template void adamw(Launch, View<double>, View<const double>, View<double>,
                    View<double>, const AdamWOptions&);

}  // namespace tapeline::cuda
