#include "kernels/rms_norm/rms_norm.h"

#include <cmath>

#include "gtest/gtest.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/rms_norm/rms_norm_cases.h"
#include "tests/support/buffer.h"
#include "tests/support/cases.h"
#include "tests/support/close.h"
#include "tests/support/finite_differences.h"
#include "tests/support/fixture.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

template <class T>
class RmsNorm : public testing::Test {};
using FloatTypes = testing::Types<float, bf16, double>;
TYPED_TEST_SUITE(RmsNorm, FloatTypes);

template <class T>
struct Problem {
  explicit Problem(const RmsNormCase& c)
      : n(c.n),
        d(c.d),
        eps(c.eps),
        x({n, d}, c.gap),
        y({n, d}, c.gap),
        dy({n, d}, c.gap),
        dx({n, d}, c.gap),
        w({d}),
        rstd({n}),
        dw({d}) {
    x.normal(1, c.scale);
    dy.normal(2);
    w.normal(3);
    dw.normal(4);
  }
  void forward(Launch l = launch()) {
    rms_norm_forward(l, x.in(), w.in(), eps, y.view(), rstd.view());
  }
  void backward(Launch l = launch()) {
    rms_norm_backward(l, dy.in(), x.in(), w.in(), rstd.in(), dx.view());
  }
  void backward_weight(Launch l = launch()) {
    rms_norm_backward_weight(l, dy.in(), x.in(), rstd.in(), dw.view());
  }
  // dx and dw, in one pass if there is one.
  void backward_both(Launch l = launch()) {
    using A = Accumulator<T>;
    const int64_t parts = rms_norm_parts(l, dy.in(), x.in(), w.in(), dx.view());
    if (parts == 0) {
      backward(l);
      return backward_weight(l);
    }
    Buffer<A> partial({parts, d});
    rms_norm_backward(l, dy.in(), x.in(), w.in(), rstd.in(), dx.view(),
                      partial.view());
    rms_norm_add_parts(l, partial.in(), dw.view());
    EXPECT_TRUE(partial.guards_intact());
  }

  int64_t n, d;
  float eps;
  Buffer<T> x, y, dy, dx, w;
  Buffer<Accumulator<T>> rstd, dw;
};

// In f64, by the definition; dx as the product with the Jacobian
// d y_k / d x_j = w_k rstd (delta_kj - x_k x_j rstd^2 / D).
TYPED_TEST(RmsNorm, AgreesWithItsDefinition) {
  using T = TypeParam;
  for (const RmsNormCase& c : each(rms_norm_cases())) {
    Problem<T> p(c);
    SCOPED_TRACE(describe(p.x.in()));
    const std::vector<double> x = p.x.values(), w = p.w.values(),
                              dy = p.dy.values();
    std::vector<double> y, dx, rstd, dw = p.dw.values();
    for (int64_t i = 0; i < c.n; ++i) {
      const double* xi = &x[i * c.d];
      const double* dyi = &dy[i * c.d];
      double squares = 0, projection = 0;
      for (int64_t j = 0; j < c.d; ++j) {
        squares += xi[j] * xi[j];
        projection += dyi[j] * w[j] * xi[j];
      }
      const double r = 1 / std::sqrt(squares / c.d + c.eps);
      rstd.push_back(r);
      for (int64_t j = 0; j < c.d; ++j) {
        y.push_back(xi[j] * r * w[j]);
        dx.push_back(r * (dyi[j] * w[j] - xi[j] * r * r * projection / c.d));
        dw[j] += dyi[j] * xi[j] * r;
      }
    }
    p.forward();
    const Shape rows{c.n, c.d};
    EXPECT_TRUE(Close(p.y.in(), view_of(y, rows), {.sum_length = c.d}));
    EXPECT_TRUE(Close(p.rstd.in(), view_of(rstd, {c.n}), {.sum_length = c.d}));
    const std::vector<double> dw_before = p.dw.values();
    const auto expect_gradients = [&] {
      EXPECT_TRUE(Close(p.dx.in(), view_of(dx, rows), {.sum_length = c.d}));
      EXPECT_TRUE(
          Close(p.dw.in(), view_of(dw, {c.d}), {.sum_length = c.n + c.d}));
      EXPECT_TRUE(p.dx.guards_intact() && p.dw.guards_intact());
    };
    p.backward();
    p.backward_weight();
    expect_gradients();
    p.dx.poison();
    p.dw.set(dw_before);
    p.backward_both();
    expect_gradients();
    EXPECT_TRUE(p.y.guards_intact() && p.rstd.guards_intact());
  }
}

// The golden weights are not on the bf16 grid.
template <class T>
void expect_agreement_with_transformers() {
  const Fixture golden = Fixture::open("tests/data/ops/misc.safetensors");
  Problem<T> p({.n = 8, .d = 64, .eps = 1e-5f});
  p.x.set(golden.values("rms.x"));
  p.w.set(golden.values("rms.w"));
  p.dy.set(golden.values("rms.dy"));
  p.dw.set(std::vector<double>(64, 0.0));
  p.forward();
  p.backward();
  p.backward_weight();
  const std::vector<float> y = golden.floats("rms.y"),
                           dx = golden.floats("rms.dx"),
                           dw = golden.floats("rms.dw");
  EXPECT_TRUE(Close(p.y.in(), view_of(y, {8, 64}), {.sum_length = 64}));
  EXPECT_TRUE(Close(p.dx.in(), view_of(dx, {8, 64}), {.sum_length = 64}));
  EXPECT_TRUE(Close(p.dw.in(), view_of(dw, {64}), {.sum_length = 64}));
}

TEST(RmsNormGolden, AgreesWithTransformers) {
  expect_agreement_with_transformers<float>();
  expect_agreement_with_transformers<double>();
}

TEST(RmsNormGradient, IsThatOfForward) {
  Problem<double> p({.n = 3, .d = 17, .gap = 2});
  const auto loss = [&] {
    p.forward();
    return inner_product(p.y, p.dy);
  };
  const std::vector<float> dx = numeric_gradient(p.x, loss);
  const std::vector<float> dw = numeric_gradient(p.w, loss);
  p.forward();
  p.backward();
  p.dw.set(std::vector<double>(17, 0.0));
  p.backward_weight();
  EXPECT_TRUE(Close(p.dx.in(), view_of(dx, {3, 17})));
  EXPECT_TRUE(Close(p.dw.in(), view_of(dw, {17})));
}

// The residual's sum and its norm in one pass, and in two.
TYPED_TEST(RmsNorm, OfASumIsAddAndNorm) {
  using T = TypeParam;
  for (const RmsNormCase& c : each(rms_norm_cases())) {
    Problem<T> p(c);
    SCOPED_TRACE(describe(p.x.in()));
    const Shape rows{c.n, c.d};
    Buffer<T> sum(rows, c.gap), twice(rows, c.gap), y(rows, c.gap);
    Buffer<Accumulator<T>> rstd({c.n});
    add_rms_norm_forward(launch(), p.x.in(), p.dy.in(), p.w.in(), p.eps,
                         sum.view(), y.view(), rstd.view());
    add(launch(), p.x.in(), p.dy.in(), twice.view());
    rms_norm_forward(launch(), twice.in(), p.w.in(), p.eps, p.y.view(),
                     p.rstd.view());
    EXPECT_TRUE(Bitwise(sum.in(), twice.in()));
    EXPECT_TRUE(Bitwise(y.in(), p.y.in()));
    EXPECT_TRUE(Bitwise(rstd.in(), p.rstd.in()));
    EXPECT_TRUE(sum.guards_intact() && y.guards_intact());
    EXPECT_TRUE(rstd.guards_intact());
  }
}

TYPED_TEST(RmsNorm, PartsAddUp) {
  using A = Accumulator<TypeParam>;
  for (const int parts : {3, 33, 264}) {
    Buffer<A> partial({parts, 40}), dw({40});
    partial.normal(1);
    dw.normal(2);
    std::vector<double> expected = dw.values();
    const std::vector<double> terms = partial.values();
    for (int i = 0; i < parts * 40; ++i) expected[i % 40] += terms[i];
    rms_norm_add_parts(launch(), partial.in(), dw.view());
    EXPECT_TRUE(
        Close(dw.in(), view_of(expected, {40}), {.sum_length = parts + 1}));
    EXPECT_TRUE(dw.guards_intact());
  }
}

TYPED_TEST(RmsNorm, DxMayBeDyInOnePass) {
  using A = Accumulator<TypeParam>;
  Problem<TypeParam> p({.n = 90, .d = 64});
  p.forward();
  const View<TypeParam> in_place = p.dy.view();
  const int64_t parts =
      rms_norm_parts(launch(), p.dy.in(), p.x.in(), p.w.in(), in_place);
  if (parts == 0) return;  // two passes, as below
  p.backward_both();
  const std::vector<double> dw = p.dw.values();
  p.dw.normal(4);
  Buffer<A> partial({parts, 64});
  rms_norm_backward(launch(), p.dy.in(), p.x.in(), p.w.in(), p.rstd.in(),
                    in_place, partial.view());
  rms_norm_add_parts(launch(), partial.in(), p.dw.view());
  EXPECT_TRUE(Bitwise(p.dy.in(), p.dx.in()));
  EXPECT_EQ(p.dw.values(), dw);
}

TYPED_TEST(RmsNorm, DxMayBeDy) {
  Problem<TypeParam> p({.n = 4, .d = 50});
  p.forward();
  p.backward();
  rms_norm_backward(launch(), p.dy.in(), p.x.in(), p.w.in(), p.rstd.in(),
                    p.dy.view());
  EXPECT_TRUE(Bitwise(p.dy.in(), p.dx.in()));
}

TYPED_TEST(RmsNorm, BitsDoNotDependOnThreads) {
  Problem<TypeParam> p({.n = 1000, .d = 300, .gap = 1});
  EXPECT_TRUE(SameForAnyThreads(p.y, [&](Launch l) { p.forward(l); }));
  EXPECT_TRUE(SameForAnyThreads(p.rstd, [&](Launch l) { p.forward(l); }));
  EXPECT_TRUE(SameForAnyThreads(p.dx, [&](Launch l) { p.backward(l); }));
  EXPECT_TRUE(SameForAnyThreads(
      p.dw, [&] { p.dw.normal(4); }, [&](Launch l) { p.backward_weight(l); }));
}

// A row's result does not depend on the rows around it.
TYPED_TEST(RmsNorm, RowsAreIndependent) {
  Problem<TypeParam> p({.n = 70, .d = 130});
  p.forward();
  Buffer<TypeParam> y({1, 130});
  Buffer<Accumulator<TypeParam>> rstd({1});
  rms_norm_forward(launch(), p.x.in().slice(0, 41, 42), p.w.in(), p.eps,
                   y.view(), rstd.view());
  EXPECT_TRUE(Bitwise(y.in(), p.y.in().slice(0, 41, 42)));
}

TEST(RmsNormDeathTest, NamesTheShapes) {
  Problem<float> p({.n = 3, .d = 8});
  Buffer<float> w({7});
  EXPECT_DEATH(rms_norm_forward(launch(), p.x.in(), w.in(), 1e-5f, p.y.view(),
                                p.rstd.view()),
               "\\[rms_norm_forward\\] shapes: x is f32\\[3, 8\\]");
}

}  // namespace
}  // namespace tapeline
