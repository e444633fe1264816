#include <cmath>

#include "kernels/cuda_rows.cuh"
#include "kernels/muon/muon_cuda.h"

namespace tapeline::cuda {
namespace {

// Compiled without contraction, elementwise steps give the reference's bits.
constexpr int kThreads = 256;
constexpr int kNormThreads = 1024;

template <class A>
struct Momentum {
  A scale, beta, rest;
  bool nesterov;
};

template <bool kWhole, class A>
__global__ void __launch_bounds__(kThreads)
    muon_momentum_kernel(int64_t n, Momentum<A> f, double scale,
                         const double* clip, const A* grad, A* momentum,
                         A* update) {
  constexpr int kN = Pack<A>::kSize;
  const int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (j * kN >= n) return;
  if (clip != nullptr) {
    if (!isfinite(*clip)) {
      store_pack<kWhole>(update, j, n, Pack<A>{});
      return;
    }
    f.scale = A(scale * *clip);
  }
  const Pack<A> g_pack = load_pack<kWhole, kN>(grad, j, n);
  Pack<A> m_pack = load_pack<kWhole, kN>(momentum, j, n), u_pack;
#pragma unroll
  for (int e = 0; e < kN; ++e) {
    const A g = f.scale * g_pack.at[e];
    const A m = fma(f.rest, g - m_pack.at[e], m_pack.at[e]);
    m_pack.at[e] = m;
    u_pack.at[e] = f.nesterov ? fma(f.beta, m - g, g) : m;
  }
  store_pack<kWhole>(momentum, j, n, m_pack);
  store_pack<kWhole>(update, j, n, u_pack);
}

template <bool kWhole, class A>
__global__ void __launch_bounds__(kThreads)
    muon_apply_kernel(int64_t n, A decay, A rate, const double* clip,
                      const A* update, A* param) {
  constexpr int kN = Pack<A>::kSize;
  const int64_t j = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (j * kN >= n || (clip != nullptr && !isfinite(*clip))) return;
  const Pack<A> u = load_pack<kWhole, kN>(update, j, n);
  Pack<A> p = load_pack<kWhole, kN>(param, j, n);
#pragma unroll
  for (int e = 0; e < kN; ++e) {
    p.at[e] = fma(-rate, u.at[e], decay * p.at[e]);
  }
  store_pack<kWhole>(param, j, n, p);
}

template <bool kWhole, class A>
__global__ void __launch_bounds__(kNormThreads)
    muon_normalize_kernel(int64_t n, const A* update, A* x) {
  constexpr int kN = Pack<A>::kSize;
  const int64_t packs = (n + kN - 1) / kN;
  const int64_t first = int64_t{blockIdx.x} * kNormThreads + threadIdx.x;
  constexpr int64_t kStep = int64_t{kCluster} * kNormThreads;
  double sum = 0;
#pragma unroll 4
  for (int64_t j = first; j < packs; j += kStep) {
    const Pack<A> v = load_pack<kWhole, kN>(update, j, n);
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      const double a = v.at[e];
      sum = fma(a, a, sum);
    }
  }
  const double squares = cluster_sum(block_sum<kNormThreads>(sum));
  const A factor = A(1 / (sqrt(squares) + 1e-7));
  for (int64_t j = first; j < packs; j += kStep) {
    Pack<A> v = load_pack<kWhole, kN>(update, j, n);
#pragma unroll
    for (int e = 0; e < kN; ++e) v.at[e] = factor * v.at[e];
    store_pack<kWhole>(x, j, n, v);
  }
}

template <class A>
__global__ void __launch_bounds__(kThreads)
    muon_add_terms_kernel(int64_t side, A a, A b, const A* s, A* p) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= side * side) return;
  A value = fma(b, s[i], p[i]);
  if (i % (side + 1) == 0) value += a;  // on the diagonal
  p[i] = value;
}

template <class A>
unsigned block_count(int64_t n) {
  return static_cast<unsigned>(ceil_div(n, kThreads * Pack<A>::kSize));
}
template <class A>
View<const A> flat(const A* data, int64_t n) {
  return {data, Shape{n}};
}

}  // namespace

template <class A>
void muon_momentum(Launch l, View<const A> grad, View<A> momentum, double beta,
                   bool nesterov, View<A> update, double gradient_scale,
                   View<const double> clip_1) {
  const int64_t n = grad.elements();
  if (n == 0) return;
  const Momentum<A> f = {A(gradient_scale), A(beta), A(1 - beta), nesterov};
  const auto run = [&]<bool kWhole>() {
    muon_momentum_kernel<kWhole>
        <<<block_count<A>(n), kThreads, 0, stream_of(l)>>>(
            n, f, gradient_scale, clip_1.data, grad.data, momentum.data,
            update.data);
  };
  by_alignment(run, flat<A>(grad.data, n), flat<A>(momentum.data, n),
               flat<A>(update.data, n));
  check_launch("muon_momentum");
}

template <class A>
void muon_apply(Launch l, View<const A> update, double lr_scaled,
                double weight_decay, double lr, View<A> param,
                View<const double> clip_1) {
  const int64_t n = update.elements();
  if (n == 0) return;
  const auto run = [&]<bool kWhole>() {
    muon_apply_kernel<kWhole, A>
        <<<block_count<A>(n), kThreads, 0, stream_of(l)>>>(
            n, A(1 - lr * weight_decay), A(lr_scaled), clip_1.data, update.data,
            param.data);
  };
  by_alignment(run, flat<A>(update.data, n), flat<A>(param.data, n));
  check_launch("muon_apply");
}

template <class A>
void muon_normalize(Launch l, View<const A> update, View<A> x) {
  const int64_t n = update.elements();
  const auto run = [&]<bool kWhole>() {
    launch_clusters(l, muon_normalize_kernel<kWhole, A>, dim3(kCluster),
                    kNormThreads, 0, n, update.data, x.data);
  };
  by_alignment(run, flat<A>(update.data, n), flat<A>(x.data, n));
  check_launch("muon_normalize");
}

template <class A>
void muon_add_terms(Launch l, double a, double b, View<const A> s, View<A> p) {
  const int64_t side = s.size(0);
  const auto blocks = static_cast<unsigned>(ceil_div(side * side, kThreads));
  if (blocks == 0) return;
  muon_add_terms_kernel<A>
      <<<blocks, kThreads, 0, stream_of(l)>>>(side, A(a), A(b), s.data, p.data);
  check_launch("muon_add_terms");
}

#define INSTANTIATE(A)                                                      \
  template void muon_momentum(Launch, View<const A>, View<A>, double, bool, \
                              View<A>, double, View<const double>);         \
  template void muon_apply(Launch, View<const A>, double, double, double,   \
                           View<A>, View<const double>);                    \
  template void muon_normalize(Launch, View<const A>, View<A>);             \
  template void muon_add_terms(Launch, double, double, View<const A>, View<A>)
INSTANTIATE(float);
INSTANTIATE(double);
#undef INSTANTIATE

}  // namespace tapeline::cuda
