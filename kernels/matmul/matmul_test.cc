#include "kernels/matmul/matmul.h"

#include "gtest/gtest.h"
#include "kernels/matmul/matmul_cases.h"
#include "tests/support/buffer.h"
#include "tests/support/cases.h"
#include "tests/support/close.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

Shape matrix(int64_t batch, bool transpose, int64_t rows, int64_t columns) {
  if (transpose) std::swap(rows, columns);
  return batch ? Shape{batch, rows, columns} : Shape{rows, columns};
}

// Three loops in f64.
std::vector<double> triple_loop(const MatmulCase& c,
                                const std::vector<double>& a,
                                const std::vector<double>& b,
                                std::vector<double> y) {
  for (int64_t s = 0; s < std::max<int64_t>(c.batch, 1); ++s) {
    for (int64_t i = 0; i < c.m; ++i) {
      for (int64_t j = 0; j < c.n; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < c.k; ++k) {
          const int64_t at =
              s * c.m * c.k +
              (c.options.transpose_a ? k * c.m + i : i * c.k + k);
          const int64_t bt =
              (c.shared_b ? 0 : s * c.k * c.n) +
              (c.options.transpose_b ? j * c.k + k : k * c.n + j);
          sum += a[at] * b[bt];
        }
        double& out = y[(s * c.m + i) * c.n + j];
        out = c.options.alpha * sum + (c.options.accumulate ? out : 0);
      }
    }
  }
  return y;
}

std::string name(const MatmulCase& c) {
  std::ostringstream out;
  out << "batch " << c.batch << " m " << c.m << " n " << c.n << " k " << c.k
      << (c.options.transpose_a ? " a^T" : "")
      << (c.options.transpose_b ? " b^T" : "")
      << (c.options.accumulate ? " +=" : "") << " gap " << c.gap;
  return out.str();
}

template <class T, class C>
void check(const MatmulCase& c) {
  SCOPED_TRACE(name(c));
  const MatmulOptions& o = c.options;
  Buffer<T> a(matrix(c.batch, o.transpose_a, c.m, c.k), c.gap);
  Buffer<T> b(matrix(c.shared_b ? 1 : c.batch, o.transpose_b, c.k, c.n), c.gap);
  Buffer<C> y(matrix(c.batch, false, c.m, c.n), c.gap);
  a.normal(1);
  b.normal(2);
  std::vector<double> before(c.m * c.n * std::max<int64_t>(c.batch, 1));
  if (o.accumulate) before = y.normal(3).values();
  View<const T> b_view = b.in();
  if (c.shared_b) {
    b_view.shape[0] = c.batch;
    b_view.strides[0] = 0;
  }
  matmul(launch(), a.in(), b_view, y.view(), o);
  const std::vector<double> expected =
      triple_loop(c, a.values(), b.values(), before);
  EXPECT_TRUE(
      Close(y.in(), view_of(expected, y.in().shape), {.sum_length = c.k + 1}));
  EXPECT_TRUE(y.guards_intact());
}

TEST(Matmul, AgreesWithThreeLoopsInF32) {
  for (const MatmulCase& c : each(matmul_cases())) check<float, float>(c);
}
TEST(Matmul, AgreesWithThreeLoopsInBf16) {
  for (const MatmulCase& c : each(matmul_cases())) check<bf16, bf16>(c);
}
TEST(Matmul, AgreesWithThreeLoopsFromBf16ToF32) {
  for (const MatmulCase& c : each(matmul_cases())) check<bf16, float>(c);
}
TEST(Matmul, AgreesWithThreeLoopsInF64) {
  for (const MatmulCase& c : each(matmul_cases())) check<double, double>(c);
}

// Products of 1 and 2^-7 added to 1024: a bf16 sum would lose each.
TEST(Matmul, Bf16SumsAreKeptInFloat) {
  Buffer<bf16> a({1, 1024}), b({1024, 1}), y({1, 1});
  a.set(std::vector<double>(1024, 1));
  b.set(std::vector<double>(1024, 0.0078125));
  y.set({1024});
  matmul(launch(), a.in(), b.in(), y.view(), {.accumulate = true});
  EXPECT_EQ(y.values()[0], 1032);
}

// 2^-8 + 2^-17 rounds to 2^-8, and 1 + 2^-8, a tie, to 1.
TEST(Matmul, Bf16RoundsOnceAfterAccumulating) {
  Buffer<bf16> a({1, 2}), b({2, 1}), y({1, 1});
  a.set({1, 1});
  b.set({0x1p-8, 0x1p-17});
  y.set({1});
  matmul(launch(), a.in(), b.in(), y.view(), {.accumulate = true});
  EXPECT_EQ(y.values()[0], 1.0078125);
}

template <class T>
class MatmulThreads : public testing::Test {};
using FloatTypes = testing::Types<float, bf16, double>;
TYPED_TEST_SUITE(MatmulThreads, FloatTypes);

TYPED_TEST(MatmulThreads, BitsDoNotDependOnTheirNumber) {
  using T = TypeParam;
  for (const bool tb : {false, true}) {
    Buffer<T> a({512, 512}), b({512, 512}), y({512, 512});
    a.normal(1);
    b.normal(2);
    EXPECT_TRUE(SameForAnyThreads(y, [&](Launch l) {
      matmul(l, a.in(), b.in(), y.view(), {.transpose_b = tb});
    }));
  }
}

// The shapes of a small model's layers give every one of eight threads work.
TEST(MatmulTiles, CutSmallProductsForSeveralThreads) {
  const auto tiles = [](int64_t batch, int64_t m, int64_t n) {
    const MatmulTiles t = matmul_tiles(batch, m, n);
    return batch * ceil_div(m, t.rows) * ceil_div(n, t.columns);
  };
  for (int64_t m : {512, 1024, 2048}) {
    for (int64_t n : {128, 256, 512}) EXPECT_GE(tiles(1, m, n), 8) << m << n;
  }
  EXPECT_EQ(matmul_tiles(1, 4096, 4096), (MatmulTiles{128, 512}));
  EXPECT_EQ(matmul_tiles(1, 512, 128), (MatmulTiles{64, 128}));
  EXPECT_EQ(matmul_tiles(1, 1, 1), (MatmulTiles{64, 128}));
}

TEST(MatmulDeathTest, NamesBothShapes) {
  Buffer<float> a({3, 4}), b({5, 6}), y({3, 6});
  EXPECT_DEATH(matmul(launch(), a.in(), b.in(), y.view()),
               "\\[matmul\\] shapes: a is f32\\[3, 4\\], b is f32\\[5, 6\\]");
  EXPECT_DEATH(matmul(launch(), a.in(), b.in().transpose(0, 1), y.view()),
               "\\[matmul\\]");
}

}  // namespace
}  // namespace tapeline
