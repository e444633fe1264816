#include "kernels/layer_norm/layer_norm.h"

#include <cmath>

#include "gtest/gtest.h"
#include "kernels/layer_norm/layer_norm_cases.h"
#include "tests/support/buffer.h"
#include "tests/support/cases.h"
#include "tests/support/close.h"
#include "tests/support/finite_differences.h"
#include "tests/support/fixture.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

template <class T>
class LayerNorm : public testing::Test {};
using FloatTypes = testing::Types<float, bf16, double>;
TYPED_TEST_SUITE(LayerNorm, FloatTypes);

template <class T>
struct Problem {
  explicit Problem(const LayerNormCase& c)
      : n(c.n),
        d(c.d),
        eps(c.eps),
        x({n, d}, c.gap),
        y({n, d}, c.gap),
        dy({n, d}, c.gap),
        dx({n, d}, c.gap),
        w({d}),
        b({d}),
        mean({n}),
        rstd({n}),
        dw({d}),
        db({d}) {
    x.normal(1, c.scale);
    dy.normal(2);
    w.normal(3);
    b.normal(4);
    dw.normal(5);
    db.normal(6);
  }
  void forward(Launch l = launch()) {
    layer_norm_forward(l, x.in(), w.in(), b.in(), eps, y.view(), mean.view(),
                       rstd.view());
  }
  void backward(Launch l = launch()) {
    layer_norm_backward(l, dy.in(), x.in(), w.in(), mean.in(), rstd.in(),
                        dx.view());
  }
  void backward_weight(Launch l = launch()) {
    layer_norm_backward_weight(l, dy.in(), x.in(), mean.in(), rstd.in(),
                               dw.view(), db.view());
  }
  // dx, dw and db, in one pass if there is one.
  void backward_both(Launch l = launch()) {
    using A = Accumulator<T>;
    const int64_t parts =
        layer_norm_parts(l, dy.in(), x.in(), w.in(), dx.view());
    if (parts == 0) {
      backward(l);
      return backward_weight(l);
    }
    Buffer<A> partial({parts, 2, d});
    layer_norm_backward(l, dy.in(), x.in(), w.in(), mean.in(), rstd.in(),
                        dx.view(), partial.view());
    layer_norm_add_parts(l, partial.in(), dw.view(), db.view());
    EXPECT_TRUE(partial.guards_intact());
  }

  int64_t n, d;
  float eps;
  Buffer<T> x, y, dy, dx, w, b;
  Buffer<Accumulator<T>> mean, rstd, dw, db;
};

TYPED_TEST(LayerNorm, AgreesWithItsDefinition) {
  using T = TypeParam;
  for (const LayerNormCase& c : each(layer_norm_cases())) {
    Problem<T> p(c);
    SCOPED_TRACE(describe(p.x.in()));
    const std::vector<double> x = p.x.values(), w = p.w.values(),
                              b = p.b.values(), dy = p.dy.values();
    std::vector<double> y, dx, dw = p.dw.values(), db = p.db.values();
    for (int64_t i = 0; i < c.n; ++i) {
      const double* xi = &x[i * c.d];
      const double* dyi = &dy[i * c.d];
      // What is summed over a row is wider than the widest T.
      long double mean = 0, variance = 0, g = 0, gh = 0;
      for (int64_t j = 0; j < c.d; ++j) mean += xi[j];
      mean /= static_cast<long double>(c.d);
      for (int64_t j = 0; j < c.d; ++j) {
        variance += (xi[j] - mean) * (xi[j] - mean) / c.d;
      }
      const long double r = 1 / std::sqrt(variance + c.eps);
      for (int64_t j = 0; j < c.d; ++j) {
        g += dyi[j] * w[j] / c.d;
        gh += dyi[j] * w[j] * (xi[j] - mean) * r / c.d;
      }
      for (int64_t j = 0; j < c.d; ++j) {
        const long double h = (xi[j] - mean) * r;
        y.push_back(static_cast<double>(h * w[j] + b[j]));
        dx.push_back(static_cast<double>(r * (dyi[j] * w[j] - g - h * gh)));
        dw[j] += static_cast<double>(dyi[j] * h);
        db[j] += dyi[j];
      }
    }
    p.forward();
    const std::vector<double> dw_before = p.dw.values(),
                              db_before = p.db.values();
    const Shape rows{c.n, c.d};
    const Tolerance over_columns = {.sum_length = c.d};
    const Tolerance over_rows = {.sum_length = c.n + c.d};
    EXPECT_TRUE(Close(p.y.in(), view_of(y, rows), over_columns));
    const auto expect_gradients = [&] {
      EXPECT_TRUE(Close(p.dx.in(), view_of(dx, rows), over_columns));
      EXPECT_TRUE(Close(p.dw.in(), view_of(dw, {c.d}), over_rows));
      EXPECT_TRUE(Close(p.db.in(), view_of(db, {c.d}), over_rows));
      EXPECT_TRUE(p.dx.guards_intact());
      EXPECT_TRUE(p.dw.guards_intact() && p.db.guards_intact());
    };
    p.backward();
    p.backward_weight();
    expect_gradients();
    p.dx.poison();
    p.dw.set(dw_before);
    p.db.set(db_before);
    p.backward_both();
    expect_gradients();
    EXPECT_TRUE(p.y.guards_intact());
    EXPECT_TRUE(p.mean.guards_intact() && p.rstd.guards_intact());
  }
}

// mean(x^2) - mean^2 would lose every digit of the variance here.
TEST(LayerNorm, RowsFarFromZeroKeepTheirDigits) {
  Buffer<float> x({1, 4}), y({1, 4}), w({4}), b({4}), mean({1}), rstd({1});
  x.set({10000, 10001, 10002, 10003});
  w.set({1, 1, 1, 1});
  b.set({0, 0, 0, 0});
  layer_norm_forward(launch(), x.in(), w.in(), b.in(), 0.0f, y.view(),
                     mean.view(), rstd.view());
  EXPECT_EQ(mean.values()[0], 10001.5);
  EXPECT_NEAR(rstd.values()[0], 1 / std::sqrt(1.25), 1e-7);
  EXPECT_NEAR(y.values()[0], -1.5 / std::sqrt(1.25), 1e-6);
}

// The golden weights are not on the bf16 grid.
template <class T>
void expect_agreement_with_transformers() {
  const Fixture golden = Fixture::open("tests/data/ops/misc.safetensors");
  Problem<T> p({.n = 8, .d = 64, .eps = 1e-6f});
  p.x.set(golden.values("ln.x"));
  p.w.set(golden.values("ln.w"));
  p.b.set(golden.values("ln.b"));
  p.dy.set(golden.values("ln.dy"));
  p.dw.set(std::vector<double>(64, 0.0));
  p.db.set(std::vector<double>(64, 0.0));
  p.forward();
  p.backward();
  p.backward_weight();
  const std::vector<float> y = golden.floats("ln.y"),
                           dx = golden.floats("ln.dx"),
                           dw = golden.floats("ln.dw"),
                           db = golden.floats("ln.db");
  EXPECT_TRUE(Close(p.y.in(), view_of(y, {8, 64}), {.sum_length = 64}));
  EXPECT_TRUE(Close(p.dx.in(), view_of(dx, {8, 64}), {.sum_length = 64}));
  EXPECT_TRUE(Close(p.dw.in(), view_of(dw, {64}), {.sum_length = 64}));
  EXPECT_TRUE(Close(p.db.in(), view_of(db, {64}), {.sum_length = 64}));
}

TEST(LayerNormGolden, AgreesWithTransformers) {
  expect_agreement_with_transformers<float>();
  expect_agreement_with_transformers<double>();
}

TEST(LayerNormGradient, IsThatOfForward) {
  Problem<double> p({.n = 3, .d = 17, .gap = 2});
  const auto loss = [&] {
    p.forward();
    return inner_product(p.y, p.dy);
  };
  const std::vector<float> dx = numeric_gradient(p.x, loss);
  const std::vector<float> dw = numeric_gradient(p.w, loss);
  const std::vector<float> db = numeric_gradient(p.b, loss);
  p.forward();
  p.backward();
  p.dw.set(std::vector<double>(17, 0.0));
  p.db.set(std::vector<double>(17, 0.0));
  p.backward_weight();
  EXPECT_TRUE(Close(p.dx.in(), view_of(dx, {3, 17})));
  EXPECT_TRUE(Close(p.dw.in(), view_of(dw, {17})));
  EXPECT_TRUE(Close(p.db.in(), view_of(db, {17})));
}

TYPED_TEST(LayerNorm, PartsAddUp) {
  using A = Accumulator<TypeParam>;
  for (const int parts : {3, 33, 264}) {
    Buffer<A> partial({parts, 2, 40}), dw({40}), db({40});
    partial.normal(1);
    dw.normal(2);
    db.normal(3);
    std::vector<double> expected[] = {dw.values(), db.values()};
    const std::vector<double> terms = partial.values();
    for (int i = 0; i < parts * 80; ++i) {
      expected[i / 40 % 2][i % 40] += terms[i];
    }
    layer_norm_add_parts(launch(), partial.in(), dw.view(), db.view());
    const int64_t sum_length = parts + 1;
    EXPECT_TRUE(
        Close(dw.in(), view_of(expected[0], {40}), {.sum_length = sum_length}));
    EXPECT_TRUE(
        Close(db.in(), view_of(expected[1], {40}), {.sum_length = sum_length}));
    EXPECT_TRUE(dw.guards_intact() && db.guards_intact());
  }
}

TYPED_TEST(LayerNorm, DxMayBeDy) {
  Problem<TypeParam> p({.n = 4, .d = 50});
  p.forward();
  p.backward();
  layer_norm_backward(launch(), p.dy.in(), p.x.in(), p.w.in(), p.mean.in(),
                      p.rstd.in(), p.dy.view());
  EXPECT_TRUE(Bitwise(p.dy.in(), p.dx.in()));
}

TYPED_TEST(LayerNorm, BitsDoNotDependOnThreads) {
  Problem<TypeParam> p({.n = 1000, .d = 300, .gap = 1});
  EXPECT_TRUE(SameForAnyThreads(p.y, [&](Launch l) { p.forward(l); }));
  EXPECT_TRUE(SameForAnyThreads(p.rstd, [&](Launch l) { p.forward(l); }));
  EXPECT_TRUE(SameForAnyThreads(p.dx, [&](Launch l) { p.backward(l); }));
  EXPECT_TRUE(SameForAnyThreads(
      p.dw, [&] { p.dw.normal(4); }, [&](Launch l) { p.backward_weight(l); }));
  EXPECT_TRUE(SameForAnyThreads(
      p.db, [&] { p.db.normal(4); }, [&](Launch l) { p.backward_weight(l); }));
}

TEST(LayerNormDeathTest, NamesTheShapes) {
  Problem<float> p({.n = 3, .d = 8});
  Buffer<float> w({7});
  EXPECT_DEATH(layer_norm_forward(launch(), p.x.in(), w.in(), p.b.in(), 1e-5f,
                                  p.y.view(), p.mean.view(), p.rstd.view()),
               "\\[layer_norm_forward\\] shapes: x is f32\\[3, 8\\]");
}

}  // namespace
}  // namespace tapeline
