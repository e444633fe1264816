#include "kernels/swiglu/swiglu.h"

#include <cmath>

#include "gtest/gtest.h"
#include "kernels/swiglu/swiglu_cases.h"
#include "tests/support/buffer.h"
#include "tests/support/cases.h"
#include "tests/support/close.h"
#include "tests/support/finite_differences.h"
#include "tests/support/fixture.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

template <class T>
class Swiglu : public testing::Test {};
using FloatTypes = testing::Types<float, bf16, double>;
TYPED_TEST_SUITE(Swiglu, FloatTypes);

// gate and up as halves of one buffer, or of two buffers with gaps: either way
// rows are strided.
template <class T>
struct Problem {
  explicit Problem(const SwigluCase& c)
      : rows(c.rows),
        f(c.f),
        in({rows, 2 * f}, 1),
        d_in({rows, 2 * f}, 1),
        y({rows, f}, 3),
        dy({rows, f}, 2),
        count({3}) {
    in.normal(1, c.scale);
    dy.normal(2);
    count.set({0, 1, double(c.used)});
    if (c.used >= 0) counts = count.in();
  }
  View<const T> gate() const { return in.in().slice(1, 0, f); }
  View<const T> up() const { return in.in().slice(1, f, 2 * f); }
  void forward(Launch l = launch()) {
    swiglu_forward(l, gate(), up(), y.view(), counts);
  }
  void backward(Launch l = launch()) {
    swiglu_backward(l, dy.in(), gate(), up(), d_in.view().slice(1, 0, f),
                    d_in.view().slice(1, f, 2 * f), counts);
  }

  int64_t rows, f;
  Buffer<T> in, d_in, y, dy;
  Buffer<int32_t> count;
  View<const int32_t> counts;
};

TYPED_TEST(Swiglu, AgreesWithItsDefinition) {
  using T = TypeParam;
  for (const SwigluCase& c : each(swiglu_cases())) {
    Problem<T> p(c);
    SCOPED_TRACE(describe(p.y.in()));
    const std::vector<double> in = p.in.values(), dy = p.dy.values();
    // Rows beyond the count keep their NaNs.
    std::vector<double> y = p.y.values(), d_in = p.d_in.values();
    const int64_t used = c.used < 0 ? c.rows : c.used;
    for (int64_t i = 0; i < used; ++i) {
      for (int64_t j = 0; j < c.f; ++j) {
        const double g = in[i * 2 * c.f + j], u = in[i * 2 * c.f + c.f + j];
        const double s = 1 / (1 + std::exp(-g)), d = dy[i * c.f + j];
        y[i * c.f + j] = g * s * u;
        d_in[i * 2 * c.f + j] = d * u * (s + g * s * (1 - s));
        d_in[i * 2 * c.f + c.f + j] = d * g * s;
      }
    }
    p.forward();
    p.backward();
    EXPECT_TRUE(Close(p.y.in(), view_of(y, p.y.in().shape)));
    // s * (1 + g * (1 - s)) is a chain of ten operations, with a cancellation.
    EXPECT_TRUE(Close(p.d_in.in(), view_of(d_in, p.d_in.in().shape),
                      {.sum_length = 20}));
    EXPECT_TRUE(p.y.guards_intact() && p.d_in.guards_intact());
  }
}

TEST(SwigluGolden, AgreesWithTransformers) {
  const Fixture golden = Fixture::open("tests/data/ops/misc.safetensors");
  const Shape shape{8, 48};
  const auto check = [&]<class T>() {
    Buffer<T> gate(shape), up(shape), dy(shape), y(shape), dgate(shape),
        dup(shape);
    gate.set(golden.values("swiglu.gate"));
    up.set(golden.values("swiglu.up"));
    dy.set(golden.values("swiglu.dy"));
    swiglu_forward(launch(), gate.in(), up.in(), y.view());
    swiglu_backward(launch(), dy.in(), gate.in(), up.in(), dgate.view(),
                    dup.view());
    const std::vector<float> y_ = golden.floats("swiglu.y"),
                             dgate_ = golden.floats("swiglu.dgate"),
                             dup_ = golden.floats("swiglu.dup");
    EXPECT_TRUE(Close(y.in(), view_of(y_, shape)));
    EXPECT_TRUE(Close(dgate.in(), view_of(dgate_, shape)));
    EXPECT_TRUE(Close(dup.in(), view_of(dup_, shape)));
  };
  check.operator()<float>();
  check.operator()<bf16>();
  check.operator()<double>();
}

TEST(SwigluGradient, IsThatOfForward) {
  Problem<double> p({3, 11, -1});
  const std::vector<float> d_in = numeric_gradient(p.in, [&] {
    p.forward();
    return inner_product(p.y, p.dy);
  });
  p.backward();
  EXPECT_TRUE(Close(p.d_in.in(), view_of(d_in, {3, 22})));
}

TEST(Swiglu, SaturatesWithoutNans) {
  Buffer<float> gate({1, 4}), up({1, 4}), y({1, 4}), dgate({1, 4}), dup({1, 4});
  gate.set({-200, 200, -3e38, 3e38});
  up.set({3, 3, 1, 1});
  swiglu_forward(launch(), gate.in(), up.in(), y.view());
  EXPECT_EQ(y.values()[0], 0);
  EXPECT_EQ(y.values()[1], 600);
  EXPECT_EQ(y.values()[2], 0);
  Buffer<float> dy({1, 4});
  dy.set({1, 1, 1, 1});
  swiglu_backward(launch(), dy.in(), gate.in(), up.in(), dgate.view(),
                  dup.view());
  EXPECT_EQ(dgate.values(), (std::vector<double>{0, 3, 0, 1}));
  EXPECT_EQ(dup.values()[1], 200);
}

TYPED_TEST(Swiglu, GradientsMayReplaceTheInputs) {
  Problem<TypeParam> p({5, 37, -1});
  p.backward();
  swiglu_backward(launch(), p.dy.in(), p.gate(), p.up(),
                  p.in.view().slice(1, 0, 37), p.in.view().slice(1, 37, 74));
  EXPECT_TRUE(Bitwise(p.in.in(), p.d_in.in()));
}

TYPED_TEST(Swiglu, BitsDoNotDependOnThreads) {
  Problem<TypeParam> p({700, 300, 650, true});
  EXPECT_TRUE(SameForAnyThreads(p.y, [&](Launch l) { p.forward(l); }));
  EXPECT_TRUE(SameForAnyThreads(p.d_in, [&](Launch l) { p.backward(l); }));
}

TEST(SwigluDeathTest, NamesTheShapes) {
  Buffer<float> gate({3, 8}), up({3, 7}), y({3, 8});
  EXPECT_DEATH(swiglu_forward(launch(), gate.in(), up.in(), y.view()),
               "\\[swiglu_forward\\] shapes: f32\\[3, 8\\], f32\\[3, 7\\]");
}

}  // namespace
}  // namespace tapeline
