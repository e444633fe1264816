#include "kernels/grouped_matmul/grouped_matmul.h"

#include <numeric>

#include "gtest/gtest.h"
#include "kernels/grouped_matmul/grouped_matmul_cases.h"
#include "kernels/grouped_matmul/grouped_matmul_fast.h"
#include "tests/support/buffer.h"
#include "tests/support/cases.h"
#include "tests/support/close.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

template <class T>
class GroupedMatmul : public testing::Test {};
using FloatTypes = testing::Types<float, bf16, double>;
TYPED_TEST_SUITE(GroupedMatmul, FloatTypes);

// Everything a call needs; outputs are poison.
template <class T>
struct Problem {
  explicit Problem(const GroupedMatmulCase& c)
      : experts(static_cast<int64_t>(c.counts.size())),
        d(c.d),
        f(c.f),
        offsets({experts + 1}),
        rows(c.first + c.spare +
             std::accumulate(c.counts.begin(), c.counts.end(), int64_t{0})),
        x({rows, d}, c.gap),
        y({rows, f}, c.gap),
        dy({rows, f}, c.gap),
        dx({rows, d}, c.gap),
        w({experts, f, d}, c.gap),
        dw({experts, f, d}, c.gap) {
    std::vector<double> at = {double(c.first)};
    for (int32_t count : c.counts) at.push_back(at.back() + count);
    offsets.set(at);
    x.normal(1);
    dy.normal(2);
    w.normal(3);
    dw.normal(4);
    poison_spare_rows(x, d);
    poison_spare_rows(dy, f);
  }
  // NaN in rows of no expert: reading one shows.
  void poison_spare_rows(Buffer<T>& rows_of, int64_t columns) {
    std::vector<double> values = rows_of.values();
    for (int64_t r = 0; r < rows; ++r) {
      if (expert(r) >= 0) continue;
      for (int64_t j = 0; j < columns; ++j) values[r * columns + j] = NAN;
    }
    rows_of.set(values);
  }
  // -1: a row of no expert.
  int64_t expert(int64_t r) const {
    for (int64_t e = 0; e < experts; ++e) {
      if (r >= offsets.in()(e) && r < offsets.in()(e + 1)) return e;
    }
    return -1;
  }

  int64_t experts, d, f;
  Buffer<int32_t> offsets;
  int64_t rows;
  Buffer<T> x, y, dy, dx, w;
  Buffer<Accumulator<T>> dw;
};

TYPED_TEST(GroupedMatmul, ForwardAndDgradAgreeWithLoops) {
  using T = TypeParam;
  for (const GroupedMatmulCase& c : each(grouped_matmul_cases())) {
    Problem<T> p(c);
    SCOPED_TRACE(describe(p.x.in()) + " " + describe(p.w.in()));
    // Rows of no expert keep what was there: NaN.
    std::vector<double> y = p.y.values(), dx = p.dx.values();
    const std::vector<double> x = p.x.values(), dy = p.dy.values(),
                              w = p.w.values();
    for (int64_t r = 0; r < p.rows; ++r) {
      const int64_t e = p.expert(r);
      if (e < 0) continue;
      for (int64_t i = 0; i < p.f; ++i) y[r * p.f + i] = 0;
      for (int64_t j = 0; j < p.d; ++j) dx[r * p.d + j] = 0;
      for (int64_t i = 0; i < p.f; ++i) {
        for (int64_t j = 0; j < p.d; ++j) {
          const double weight = w[(e * p.f + i) * p.d + j];
          y[r * p.f + i] += weight * x[r * p.d + j];
          dx[r * p.d + j] += weight * dy[r * p.f + i];
        }
      }
    }
    grouped_matmul_forward(launch(), p.x.in(), p.w.in(), p.offsets.in(),
                           p.y.view());
    grouped_matmul_dgrad(launch(), p.dy.in(), p.w.in(), p.offsets.in(),
                         p.dx.view());
    EXPECT_TRUE(
        Close(p.y.in(), view_of(y, p.y.in().shape), {.sum_length = c.d}));
    EXPECT_TRUE(
        Close(p.dx.in(), view_of(dx, p.dx.in().shape), {.sum_length = c.f}));
    EXPECT_TRUE(p.y.guards_intact() && p.dx.guards_intact());
  }
}

TYPED_TEST(GroupedMatmul, WgradAddsEachExpertsRows) {
  using T = TypeParam;
  for (const GroupedMatmulCase& c : each(grouped_matmul_cases())) {
    Problem<T> p(c);
    SCOPED_TRACE(describe(p.x.in()) + " " + describe(p.w.in()));
    const Buffer<Accumulator<T>> before = p.dw;
    std::vector<double> dw = p.dw.values();
    const std::vector<double> x = p.x.values(), dy = p.dy.values();
    for (int64_t r = 0; r < p.rows; ++r) {
      const int64_t e = p.expert(r);
      if (e < 0) continue;
      for (int64_t i = 0; i < p.f; ++i) {
        for (int64_t j = 0; j < p.d; ++j) {
          dw[(e * p.f + i) * p.d + j] += dy[r * p.f + i] * x[r * p.d + j];
        }
      }
    }
    grouped_matmul_wgrad(launch(), p.dy.in(), p.x.in(), p.offsets.in(),
                         p.dw.view());
    EXPECT_TRUE(Close(p.dw.in(), view_of(dw, p.dw.in().shape),
                      {.sum_length = p.rows + 1}));
    EXPECT_TRUE(p.dw.guards_intact());
    for (int64_t e = 0; e < p.experts; ++e) {
      if (c.counts[e] == 0) {
        EXPECT_TRUE(Bitwise(p.dw.in()[e], before.in()[e])) << "expert " << e;
      }
    }
  }
}

// That is, on CUDA both kernels meet the cases above.
TEST(GroupedMatmulCases, TakeEitherPath) {
  int plain = 0, wgmma = 0;
  for (const GroupedMatmulCase& c : grouped_matmul_cases()) {
    Problem<bf16> p(c);
    for (const GroupedMatmulPath& path :
         {grouped_matmul_forward_path(p.x.in(), p.w.in(), p.y.view()),
          grouped_matmul_dgrad_path(p.dy.in(), p.w.in(), p.dx.view()),
          grouped_matmul_wgrad_path(p.dy.in(), p.x.in(), p.dw.view())}) {
      ++(path.wgmma ? wgmma : plain);
    }
  }
  EXPECT_GE(plain, 3);
  EXPECT_GE(wgmma, 3 * 8);
}

TYPED_TEST(GroupedMatmul, BitsDoNotDependOnThreads) {
  using T = TypeParam;
  Problem<T> p({{200, 0, 333, 64}, 11, 512, 256});
  EXPECT_TRUE(SameForAnyThreads(p.y, [&](Launch l) {
    grouped_matmul_forward(l, p.x.in(), p.w.in(), p.offsets.in(), p.y.view());
  }));
  EXPECT_TRUE(SameForAnyThreads(p.dx, [&](Launch l) {
    grouped_matmul_dgrad(l, p.dy.in(), p.w.in(), p.offsets.in(), p.dx.view());
  }));
  EXPECT_TRUE(SameForAnyThreads(
      p.dw, [&] { p.dw.normal(4); },
      [&](Launch l) {
        grouped_matmul_wgrad(l, p.dy.in(), p.x.in(), p.offsets.in(),
                             p.dw.view());
      }));
}

// On the CPU: a device's offsets are not the host's to read.
TEST(GroupedMatmulDeathTest, OffsetsStayInsideTheCapacity) {
  Threads threads(1);
  Problem<float> p({{3, 5}, 0, 4, 4});
  p.offsets.set({0, 3, 9});
  EXPECT_DEATH(grouped_matmul_forward(threads, p.x.in(), p.w.in(),
                                      p.offsets.in(), p.y.view()),
               "\\[grouped_matmul_forward\\] offsets 0 .. 9 of 8 rows");
  p.offsets.set({0, 5, 4});
  EXPECT_DEATH(grouped_matmul_forward(threads, p.x.in(), p.w.in(),
                                      p.offsets.in(), p.y.view()),
               "expert 1");
}

}  // namespace
}  // namespace tapeline
