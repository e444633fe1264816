#include "kernels/muon/muon.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/muon/muon_cases.h"
#include "runtime/safetensors.h"
#include "tests/support/buffer.h"
#include "tests/support/close.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

std::vector<double> golden(const std::string& name) {
  static const auto file =
      SafetensorsReader::open("kernels/muon/testdata/muon.safetensors");
  CHECK(file.ok()) << file.status();
  return file->read_tensor(name)->to_vector<double>();
}

template <class A>
void orthogonalize(Buffer<A>& x, Launch l = launch(), int iterations = 5) {
  Buffer<A> workspace({muon_workspace(x.view().shape)});
  muon_orthogonalize(l, x.view(), workspace.view(), iterations);
  EXPECT_TRUE(x.guards_intact());
  EXPECT_TRUE(workspace.guards_intact());
}

class MuonCases : public testing::TestWithParam<MuonCase> {};
INSTANTIATE_TEST_SUITE_P(, MuonCases, testing::ValuesIn(muon_cases()),
                         [](const auto& info) {
                           return std::string("m") + info.param.name();
                         });

TEST_P(MuonCases, FollowsNumpysIteration) {
  const MuonCase& c = GetParam();
  Buffer<double> x({c.rows, c.columns});
  Buffer<float> y({c.rows, c.columns});
  x.set(golden(c.name() + ".x"));
  y.set(golden(c.name() + ".x"));
  orthogonalize(x);
  orthogonalize(y);
  const std::vector<double> expected = golden(c.name() + ".ns");
  const std::vector<double> f64 = x.values(), f32 = y.values();
  for (size_t i = 0; i < expected.size(); ++i) {
    // Each step multiplies a small singular value's error by up to 3.4.
    ASSERT_NEAR(f64[i], expected[i], 1e-13) << i;
    ASSERT_NEAR(f32[i], expected[i], 2e-5) << i;
  }
}

TEST_P(MuonCases, SingularValuesEndNearOneAndVectorsStay) {
  const MuonCase& c = GetParam();
  const int64_t r = std::min(c.rows, c.columns);
  Buffer<float> x({c.rows, c.columns});
  x.set(golden(c.name() + ".x"));
  orthogonalize(x);
  const std::vector<double> u = golden(c.name() + ".u");
  const std::vector<double> vt = golden(c.name() + ".vt");
  for (int64_t i = 0; i < r; ++i) {
    for (int64_t j = 0; j < r; ++j) {
      double value = 0;  // (u^T x v)[i, j]
      for (int64_t m = 0; m < c.rows; ++m) {
        for (int64_t n = 0; n < c.columns; ++n) {
          value += u[m * r + i] * x.view()(m, n) * vt[j * c.columns + n];
        }
      }
      if (i == j) {
        EXPECT_GT(value, 0.6817);
        EXPECT_LT(value, 1.2024);
      } else {
        EXPECT_NEAR(value, 0, 5e-5);
      }
    }
  }
}

TEST_P(MuonCases, TheTransposeOfTheInputGivesTheTransposeOfTheResult) {
  const MuonCase& c = GetParam();
  Buffer<double> x({c.rows, c.columns}), y({c.columns, c.rows});
  x.normal(1);
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.columns; ++j) y.view()(j, i) = x.view()(i, j);
  }
  orthogonalize(x);
  orthogonalize(y);
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.columns; ++j) {
      EXPECT_NEAR(y.view()(j, i), x.view()(i, j), 1e-12);
    }
  }
}

TEST_P(MuonCases, AMatrixOfABatchGivesTheBitsItGivesAlone) {
  const MuonCase& c = GetParam();
  const int64_t elements = c.rows * c.columns;
  // These again and again: neighbours, which share a piece of the workspace,
  // differ.
  constexpr int64_t kDistinct = 5;
  Buffer<float> some({kDistinct, elements});
  some.normal(7);
  const std::vector<double> values = some.values();
  const auto matrix = [&](int64_t b) {
    const auto at = values.begin() + b % kDistinct * elements;
    return std::vector<double>(at, at + elements);
  };
  Threads threads(3);
  for (const Launch l : {threads.launch(), launch()}) {
    // 19: more than are in flight on the CPU. On a GPU one comes after the
    // other.
    const std::vector<int64_t> batches = l.on_cuda()
                                             ? std::vector<int64_t>{1, 3}
                                             : std::vector<int64_t>{1, 3, 19};
    std::vector<Buffer<float>> alone;
    for (int64_t b = 0; b < std::min(kDistinct, batches.back()); ++b) {
      Buffer<float> one({c.rows, c.columns});
      one.set(matrix(b));
      orthogonalize(one, l);
      alone.push_back(one);
    }
    for (int64_t batch : batches) {
      std::vector<double> all_values;
      for (int64_t b = 0; b < batch; ++b) {
        const std::vector<double> one = matrix(b);
        all_values.insert(all_values.end(), one.begin(), one.end());
      }
      Buffer<float> all({batch, c.rows, c.columns});
      all.set(all_values);
      orthogonalize(all, l);
      for (int64_t b = 0; b < batch; ++b) {
        EXPECT_TRUE(Bitwise(all.in()[b],
                            alone[static_cast<size_t>(b % kDistinct)].in()))
            << b << " of " << batch;
      }
    }
  }
}

TEST(Muon, EvenNumbersOfIterationsEndInPlaceToo) {
  // One singular value: p(p(1)) with p(1) = 0.701.
  Buffer<double> x({1, 2});
  x.set({3, 4});
  orthogonalize(x, launch(), 2);
  const double p = 3.4445 - 4.7750 + 2.0315;
  const double q = p * (3.4445 + p * p * (-4.7750 + p * p * 2.0315));
  EXPECT_NEAR(x.view()(0, 0), 0.6 * q, 1e-6);
  EXPECT_NEAR(x.view()(0, 1), 0.8 * q, 1e-6);
}

TEST(Muon, ZeroStaysZero) {
  Buffer<float> x({4, 3});
  x.set(std::vector<double>(12));
  orthogonalize(x);
  EXPECT_EQ(x.values(), std::vector<double>(12));
}

TEST(Muon, ThreadsDoNotChangeABit) {
  for (const Shape& shape : {Shape{300, 200}, Shape{40, 20, 30}}) {
    Buffer<float> x(shape);
    EXPECT_TRUE(SameForAnyThreads(
        x, [&] { x.normal(1); }, [&](Launch l) { orthogonalize(x, l); }));
  }
}

// By the header's equations; sizes below and above a chunk.
TEST(Muon, MomentumAndItsLookAheadFollowTheDefinition) {
  for (bool nesterov : {false, true}) {
    for (int64_t n : {1, 37, 20000}) {
      Buffer<float> grad({n}), momentum({n}), update({n});
      grad.normal(1);
      momentum.normal(2);
      const Buffer<float> start = momentum;
      muon_momentum(launch(), grad.in(), momentum.view(), 0.9, nesterov,
                    update.view(), 0.5);
      for (int64_t i = 0; i < n; ++i) {
        const double g = 0.5 * grad.view()(i);
        const double m = 0.9 * start.view()(i) + 0.1 * g;
        const double u = nesterov ? 0.1 * g + 0.9 * m : m;
        ASSERT_NEAR(momentum.view()(i), m, 1e-6);
        ASSERT_NEAR(update.view()(i), u, 1e-6);
      }
    }
  }
}

TEST(Muon, ApplyDecaysByTheUnscaledRate) {
  Buffer<double> update({3}), param({3});
  update.set({1, -2, 0});
  param.set({10, 10, 10});
  muon_apply(launch(), update.in(), 0.25, 0.5, 0.1, param.view());
  EXPECT_NEAR(param.view()(0), 9.5 - 0.25, 1e-15);
  EXPECT_NEAR(param.view()(1), 9.5 + 0.5, 1e-15);
  EXPECT_NEAR(param.view()(2), 9.5, 1e-15);
}

TEST(Muon, AClipThatIsNotFiniteStopsTheStep) {
  for (const double clip : {0.25, std::nan("")}) {
    Buffer<double> factor({1}), grad({5}), momentum({5}), update({5});
    Buffer<double> param({5});
    factor.set({clip});
    grad.set({1, 2, 3, 4, 5});
    momentum.set({8, 8, 8, 8, 8});
    param.set({1, 1, 1, 1, 1});
    muon_momentum(launch(), grad.in(), momentum.view(), 0.5, false,
                  update.view(), 2, factor.in());
    muon_apply(launch(), update.in(), 1, 0, 0, param.view(), factor.in());
    for (int i = 0; i < 5; ++i) {
      const double m = clip == 0.25 ? 4 + 0.25 * (i + 1) : 8;
      EXPECT_EQ(momentum.view()(i), m);
      EXPECT_EQ(update.view()(i), clip == 0.25 ? m : 0);
      EXPECT_EQ(param.view()(i), clip == 0.25 ? 1 - m : 1);
    }
  }
}

TEST(Muon, ScaleDependsOnTheShape) {
  EXPECT_DOUBLE_EQ(muon_scale(MuonScale::kMatchAdamW, 100, 2500), 10);
  EXPECT_DOUBLE_EQ(muon_scale(MuonScale::kMatchAdamW, 2500, 100), 10);
  EXPECT_DOUBLE_EQ(muon_scale(MuonScale::kSpectral, 400, 100), 2);
  EXPECT_DOUBLE_EQ(muon_scale(MuonScale::kSpectral, 100, 400), 1);
}

TEST(MuonDeath, ErrorsAreNamed) {
  Buffer<float> x({4, 3}), workspace({29}), vector({5});
  EXPECT_DEATH(muon_orthogonalize(launch(), x.view(), workspace.view()),
               "workspace is f32\\[29\\].*f32\\[4, 3\\], which needs 30");
  EXPECT_DEATH(muon_orthogonalize(launch(), vector.view(), workspace.view()),
               "needs a contiguous matrix");
  EXPECT_DEATH(muon_apply(launch(), x.in(), 1, 0, 1, vector.view()),
               "f32\\[4, 3\\] and f32\\[5\\]");
}

}  // namespace
}  // namespace tapeline
