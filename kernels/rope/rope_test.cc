#include "kernels/rope/rope.h"

#include <cmath>
#include <fstream>

#include "gtest/gtest.h"
#include "kernels/rope/rope_cases.h"
#include "nlohmann/json.hpp"
#include "tests/support/buffer.h"
#include "tests/support/cases.h"
#include "tests/support/close.h"
#include "tests/support/finite_differences.h"
#include "tests/support/fixture.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

template <class T>
class Rope : public testing::Test {};
using FloatTypes = testing::Types<float, bf16, double>;
TYPED_TEST_SUITE(Rope, FloatTypes);

// Rotated parts of wider heads, in both orders; d and e are their gradients.
template <class T>
struct Problem {
  explicit Problem(const RopeCase& c)
      : c(c),
        x({c.t, c.h, c.r + c.wider}, 1),
        y({c.t, c.h, c.r + c.wider}),
        dy({c.t, c.h, c.r + c.wider}),
        dx({c.t, c.h, c.r + c.wider}, 2),
        cos({c.t, c.r / 2}, 1),
        sin({c.t, c.r / 2}, 2) {
    x.normal(1);
    dy.normal(2);
    std::vector<double> cosines, sines;
    for (int64_t i = 0; i < c.t * c.r / 2; ++i) {
      cosines.push_back(std::cos(0.37 * i));
      sines.push_back(std::sin(0.37 * i));
    }
    cos.set(cosines);
    sin.set(sines);
  }
  template <class U>
  View<U> part(View<U> heads) const {
    return c.last ? heads.slice(2, c.wider, c.wider + c.r)
                  : heads.slice(2, 0, c.r);
  }
  int64_t at(int64_t t, int64_t h, int64_t j) const {
    return (t * c.h + h) * (c.r + c.wider) + (c.last ? c.wider : 0) + j;
  }
  void forward(bool interleaved, Launch l = launch()) {
    rope_forward(l, part(x.in()), cos.in(), sin.in(), interleaved,
                 part(y.view()));
  }
  void backward(bool interleaved, Launch l = launch()) {
    rope_backward(l, part(dy.in()), cos.in(), sin.in(), interleaved,
                  part(dx.view()));
  }

  RopeCase c;
  Buffer<T> x, y, dy, dx;
  Buffer<float> cos, sin;
};

// As products of complex numbers; what is not rotated stays poison.
TYPED_TEST(Rope, TurnsPairs) {
  using T = TypeParam;
  for (const RopeCase& c : each(rope_cases())) {
    for (const bool interleaved : {false, true}) {
      Problem<T> p(c);
      SCOPED_TRACE(describe(p.x.in()));
      const std::vector<double> x = p.x.values(), dy = p.dy.values(),
                                cos = p.cos.values(), sin = p.sin.values();
      std::vector<double> y = p.y.values(), dx = p.dx.values();
      const int64_t half = c.r / 2;
      for (int64_t t = 0; t < c.t; ++t) {
        for (int64_t h = 0; h < c.h; ++h) {
          for (int64_t j = 0; j < half; ++j) {
            const int64_t i0 = p.at(t, h, interleaved ? 2 * j : j);
            const int64_t i1 = p.at(t, h, interleaved ? 2 * j + 1 : j + half);
            const int64_t o0 = p.at(t, h, j), o1 = p.at(t, h, j + half);
            const double a = cos[t * half + j], b = sin[t * half + j];
            y[o0] = x[i0] * a - x[i1] * b;
            y[o1] = x[i0] * b + x[i1] * a;
            dx[i0] = dy[o0] * a + dy[o1] * b;
            dx[i1] = dy[o1] * a - dy[o0] * b;
          }
        }
      }
      p.forward(interleaved);
      p.backward(interleaved);
      EXPECT_TRUE(Close(p.y.in(), view_of(y, p.y.in().shape)));
      EXPECT_TRUE(Close(p.dx.in(), view_of(dx, p.dx.in().shape)));
      EXPECT_TRUE(p.y.guards_intact() && p.dx.guards_intact());
    }
  }
}

TEST(RopeGolden, AgreesWithTransformersToPositionOneMillion) {
  const Fixture golden = Fixture::open("tests/data/ops/misc.safetensors");
  const std::vector<double> inverse =
      rope_inverse_frequencies({.theta = 8e6, .dim = 64});
  EXPECT_EQ(inverse, golden.values("rope.inv_freq"));
  Buffer<int32_t> positions({16});
  positions.set(golden.values("rope.pos"));
  Buffer<float> cos({16, 32}, 1), sin({16, 32});
  rope_table(launch(), positions.in(), inverse, 1, cos.view(), sin.view());
  const std::vector<float> cos_ = golden.floats("rope.cos"),
                           sin_ = golden.floats("rope.sin");
  EXPECT_TRUE(Close(cos.in(), view_of(cos_, {16, 32})));
  EXPECT_TRUE(Close(sin.in(), view_of(sin_, {16, 32})));
  EXPECT_TRUE(cos.guards_intact());

  const Shape shape{16, 2, 64};
  const auto check = [&]<class T>(const char* name, bool interleaved) {
    Buffer<T> x(shape), y(shape);
    x.set(golden.values("rope.x"));
    rope_forward(launch(), x.in(), cos.in(), sin.in(), interleaved, y.view());
    const std::vector<float> y_ = golden.floats(name);
    EXPECT_TRUE(Close(y.in(), view_of(y_, shape))) << name;
  };
  check.operator()<float>("rope.interleaved", true);
  check.operator()<float>("rope.half", false);
  check.operator()<bf16>("rope.interleaved", true);
  check.operator()<bf16>("rope.half", false);
}

TEST(RopeGradient, IsThatOfForward) {
  for (const bool interleaved : {false, true}) {
    Problem<double> p({2, 3, 10});
    const std::vector<float> dx = numeric_gradient(p.x, [&] {
      p.forward(interleaved);
      return inner_product(p.y, p.dy);
    });
    p.backward(interleaved);
    EXPECT_TRUE(Close(p.dx.in(), view_of(dx, {2, 3, 10})));
  }
}

// Both orders of pairs give the same dot products between positions.
TEST(Rope, DotProductsDependOnTheDistanceAlone) {
  const std::vector<double> inverse =
      rope_inverse_frequencies({.theta = 1000, .dim = 16});
  Buffer<int32_t> positions({4});
  positions.set({3, 10, 45, 52});
  Buffer<float> cos({4, 8}), sin({4, 8});
  rope_table(launch(), positions.in(), inverse, 1, cos.view(), sin.view());
  Buffer<double> q({1, 1, 16}), x({4, 1, 16}), y({4, 1, 16});
  q.normal(1);
  Buffer<double> k({1, 1, 16});
  k.normal(2);
  std::vector<double> rows;
  for (int t = 0; t < 4; ++t) {
    const std::vector<double> head = t % 2 ? k.values() : q.values();
    rows.insert(rows.end(), head.begin(), head.end());
  }
  x.set(rows);
  for (const bool interleaved : {false, true}) {
    rope_forward(launch(), x.in(), cos.in(), sin.in(), interleaved, y.view());
    const std::vector<double> v = y.values();
    double near = 0, far = 0;
    for (int j = 0; j < 16; ++j) {
      near += v[j] * v[16 + j];
      far += v[32 + j] * v[48 + j];
    }
    EXPECT_NEAR(near, far, 1e-5);
  }
}

TEST(RopeFrequencies, FollowThePublishedFormulas) {
  std::ifstream in("kernels/rope/testdata/rope_frequencies.json");
  ASSERT_TRUE(in);
  const nlohmann::json cases = nlohmann::json::parse(in);
  ASSERT_EQ(cases.size(), 8u);
  for (const nlohmann::json& c : cases) {
    SCOPED_TRACE(c["name"].get<std::string>());
    const std::string scaling = c.value("scaling", "");
    const auto number = [&](const char* key, double otherwise) {
      if (!c.contains(key)) return otherwise;
      return c[key].is_string() ? std::stod(c[key].get<std::string>())
                                : c[key].get<double>();
    };
    const RopeOptions options = {
        .theta = c["theta"].get<double>(),
        .dim = c["dim"].get<int>(),
        .scaling = scaling == "yarn"     ? RopeOptions::kYarn
                   : scaling == "llama3" ? RopeOptions::kLlama3
                                         : RopeOptions::kDefault,
        .factor = number("factor", 1),
        .original_max_position = c.value("original", int64_t{0}),
        .beta_fast = number("beta_fast", 32),
        .beta_slow = number("beta_slow", 1),
        .truncate = c.value("truncate", true),
        .mscale = number("mscale", 0),
        .mscale_all_dim = number("mscale_all_dim", 0),
        .low_freq_factor = number("low", 1),
        .high_freq_factor = number("high", 4)};
    const std::vector<double> got = rope_inverse_frequencies(options);
    const auto expected = c["frequencies"].get<std::vector<double>>();
    ASSERT_EQ(got.size(), expected.size());
    for (size_t j = 0; j < got.size(); ++j) {
      // Four roundings of f32.
      EXPECT_NEAR(got[j] / expected[j], 1, 4 * 0x1p-24) << j;
    }
    EXPECT_NEAR(rope_attention_factor(options),
                c["attention_factor"].get<double>(), 1e-14);
  }
}

TEST(RopeFrequencies, AStatedAttentionFactorWins) {
  RopeOptions options = {.scaling = RopeOptions::kYarn,
                         .factor = 4,
                         .original_max_position = 1024};
  EXPECT_NEAR(rope_attention_factor(options), 1.138629, 1e-6);
  options.attention_factor = 0.5;
  EXPECT_EQ(rope_attention_factor(options), 0.5);
}

TEST(RopeTable, MultipliesByTheAttentionFactor) {
  Buffer<int32_t> positions({2});
  positions.set({0, 3});
  Buffer<float> cos({2, 1}), sin({2, 1});
  rope_table(launch(), positions.in(), {1.0}, 2, cos.view(), sin.view());
  EXPECT_EQ(cos.values()[0], 2);
  EXPECT_EQ(sin.values()[0], 0);
  EXPECT_NEAR(cos.values()[1], 2 * std::cos(3.0), 2e-7);
  EXPECT_NEAR(sin.values()[1], 2 * std::sin(3.0), 2e-7);
}

TYPED_TEST(Rope, BitsDoNotDependOnThreads) {
  Problem<TypeParam> p({600, 8, 64, 64});
  for (const bool interleaved : {false, true}) {
    EXPECT_TRUE(
        SameForAnyThreads(p.y, [&](Launch l) { p.forward(interleaved, l); }));
    EXPECT_TRUE(
        SameForAnyThreads(p.dx, [&](Launch l) { p.backward(interleaved, l); }));
  }
}

TEST(RopeDeathTest, RefusesToTurnInPlace) {
  Problem<float> p({2, 1, 8});
  EXPECT_DEATH(rope_forward(launch(), p.x.in(), p.cos.in(), p.sin.in(), true,
                            p.x.view()),
               "\\[rope_forward\\] in place");
  EXPECT_DEATH(rope_inverse_frequencies({.dim = 7}), "\\[rope\\] dim 7");
}

}  // namespace
}  // namespace tapeline
