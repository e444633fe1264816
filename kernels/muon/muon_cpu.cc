#include <algorithm>
#include <cmath>

#include "kernels/cuda_dispatch.h"
#include "kernels/grad_norm/grad_norm.h"
#include "kernels/matmul/matmul.h"
#include "kernels/muon/muon.h"
#include "kernels/muon/muon_cuda.h"
#include "kernels/simd_math.h"

namespace tapeline {
namespace {

// The quintic a x + b x^3 + c x^5 on singular values.
constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;

// Matrices of a batch that are worked on at a time, each in a workspace of its
// own: no more than this many threads help.
constexpr int64_t kInFlight = 16;

int64_t batch_of(const Shape& s) { return s.rank() == 3 ? s[0] : 1; }
int64_t short_side(const Shape& s) { return std::min(s[-1], s[-2]); }

// A second X and two square matrices.
int64_t matrix_workspace(int64_t m, int64_t n) {
  const int64_t side = std::min(m, n);
  return m * n + 2 * side * side;
}

// By value into loops: through a reference, every store could change them.
template <class A>
void scale(int64_t n, A factor, const A* from, A* to) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = factor * from[i];
}

// x = update / (its length + 1e-7); x may be the update.
template <class A>
void normalize(Launch l, View<const A> update, View<A> x) {
  if (kCuda && l.on_cuda()) return cuda::muon_normalize(l, update, x);
  const double norm = std::sqrt(squared_norm<A>(l, update));
  scale(x.elements(), A(1 / (norm + 1e-7)), update.data, x.data);
}

// p = a I + b s + p
template <class A>
void add_terms(Launch l, View<const A> s, View<A> p) {
  if (kCuda && l.on_cuda()) return cuda::muon_add_terms(l, kA, kB, s, p);
  const int64_t n = s.size(0);
  axpy(A(kB), s.data, p.data, n * n);
  for (int64_t i = 0; i < n; ++i) p(i, i) += A(kA);
}

template <class A>
void orthogonalize(Launch l, View<A> update, A* workspace, int iterations) {
  const int64_t m = update.size(0), n = update.size(1);
  const int64_t side = std::min(m, n);
  const bool tall = m > n;
  View<A> x = update;
  View<A> y(workspace, update.shape);
  const View<A> s(workspace + m * n, {side, side});
  const View<A> p(s.data + side * side, {side, side});
  // Every iteration exchanges x and y: after the last, x must be the update.
  if (iterations % 2 == 1) std::swap(x, y);
  normalize<A>(l, update, x);
  for (int i = 0; i < iterations; ++i) {
    matmul<A, A>(l, x, x, s, {.transpose_a = tall, .transpose_b = !tall});
    matmul<A, A>(l, s, s, p, {.alpha = kC});
    add_terms<A>(l, s, p);
    if (tall) {
      matmul<A, A>(l, x, p, y);
    } else {
      matmul<A, A>(l, p, x, y);
    }
    std::swap(x, y);
  }
}

template <class A>
void check_same(const View<const A>& a, const View<const A>& b,
                const char* names) {
  CHECK(a.shape == b.shape && a.contiguous() && b.contiguous())
      << "[muon] needs contiguous arrays of one shape: " << names << " are "
      << describe(a) << " and " << describe(b);
}

template <class A>
void step_momentum(int64_t n, A scale, A beta, A rest, bool nesterov,
                   const A* grad, A* momentum, A* update) {
  const A weight = nesterov ? beta : A(1);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const A g = scale * grad[i];
    const A m = std::fma(rest, g - momentum[i], momentum[i]);
    momentum[i] = m;
    update[i] = nesterov ? std::fma(weight, m - g, g) : m;
  }
}

template <class A>
void step_param(int64_t n, A decay, A rate, const A* update, A* param) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    param[i] = std::fma(-rate, update[i], decay * param[i]);
  }
}

}  // namespace

double muon_scale(MuonScale kind, int64_t rows, int64_t columns) {
  const double m = static_cast<double>(rows), n = static_cast<double>(columns);
  if (kind == MuonScale::kMatchAdamW) return 0.2 * std::sqrt(std::max(m, n));
  return std::sqrt(std::max(1.0, m / n));
}

int64_t muon_workspace(const Shape& update) {
  return std::min(batch_of(update), kInFlight) *
         matrix_workspace(update[-2], update[-1]);
}

Cost muon_orthogonalize_cost(const Shape& update, int iterations) {
  const double batch = static_cast<double>(batch_of(update));
  const double s = static_cast<double>(short_side(update));
  const double area = static_cast<double>(update[-1] * update[-2]);
  return {.flops = batch * iterations * (4 * area * s + 2 * s * s * s),
          .bytes = batch * iterations * 8 * area};
}

template <class A>
void muon_momentum(Launch l, View<const A> grad, View<A> momentum, double beta,
                   bool nesterov, View<A> update, double gradient_scale,
                   View<const double> clip_1) {
  if (l.dry) return;
  check_same<A>(grad, momentum, "gradient and momentum");
  check_same<A>(grad, update, "gradient and update");
  if (kCuda && l.on_cuda()) {
    return cuda::muon_momentum(l, grad, momentum, beta, nesterov, update,
                               gradient_scale, clip_1);
  }
  const double clip = clip_1 ? *clip_1.data : 1;
  if (!std::isfinite(clip)) {
    std::fill_n(update.data, update.elements(), A(0));
    return;
  }
  l.threads->parallel_for(
      grad.elements(), rows_per_chunk(1), [&](int64_t begin, int64_t end) {
        step_momentum(end - begin, A(gradient_scale * clip), A(beta),
                      A(1 - beta), nesterov, grad.data + begin,
                      momentum.data + begin, update.data + begin);
      });
}

template <class A>
void muon_orthogonalize(Launch l, View<A> update, View<A> workspace,
                        int iterations) {
  if (l.dry) return;
  const Shape& shape = update.shape;
  CHECK((shape.rank() == 2 || shape.rank() == 3) && update.contiguous())
      << "[muon] needs a contiguous matrix or batch of them: update is "
      << describe(update);
  CHECK(workspace.contiguous() && workspace.elements() >= muon_workspace(shape))
      << "[muon] workspace is " << describe(workspace) << " for an update of "
      << describe(update) << ", which needs " << muon_workspace(shape);
  CHECK_GE(iterations, 1);
  const int64_t batch = batch_of(shape), area = shape[-1] * shape[-2];
  const int64_t each = matrix_workspace(shape[-2], shape[-1]);
  const auto run = [&](int64_t b, int64_t place) {
    orthogonalize(l, View<A>(update.data + b * area, {shape[-2], shape[-1]}),
                  workspace.data + place * each, iterations);
  };
  // A matrix gives the same bits on one thread as on all, so this chooses speed
  // alone: few matrices share the threads one after the other. A stream takes
  // its work from one thread.
  if (l.on_cuda() || batch < l.threads->threads()) {
    for (int64_t b = 0; b < batch; ++b) run(b, 0);
    return;
  }
  const int64_t grain = ceil_div(batch, kInFlight);
  l.threads->parallel_for(batch, grain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) run(b, begin / grain);
  });
}

template <class A>
void muon_apply(Launch l, View<const A> update, double lr_scaled,
                double weight_decay, double lr, View<A> param,
                View<const double> clip_1) {
  if (l.dry) return;
  check_same<A>(update, param, "update and parameter");
  if (kCuda && l.on_cuda()) {
    return cuda::muon_apply(l, update, lr_scaled, weight_decay, lr, param,
                            clip_1);
  }
  if (clip_1 && !std::isfinite(*clip_1.data)) return;
  l.threads->parallel_for(
      param.elements(), rows_per_chunk(1), [&](int64_t begin, int64_t end) {
        step_param(end - begin, A(1 - lr * weight_decay), A(lr_scaled),
                   update.data + begin, param.data + begin);
      });
}

#define INSTANTIATE(A)                                                      \
  template void muon_momentum(Launch, View<const A>, View<A>, double, bool, \
                              View<A>, double, View<const double>);         \
  template void muon_orthogonalize(Launch, View<A>, View<A>, int);          \
  template void muon_apply(Launch, View<const A>, double, double, double,   \
                           View<A>, View<const double>)
INSTANTIATE(float);
INSTANTIATE(double);
#undef INSTANTIATE

}  // namespace tapeline
