#include "kernels/dispatch/dispatch.h"

#include <sys/mman.h>

#include <vector>

#include "gtest/gtest.h"
#include "kernels/dispatch/dispatch_cases.h"
#include "tests/support/buffer.h"
#include "tests/support/close.h"
#include "tests/support/finite_differences.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

// One routing. Rows that nothing may read stay poison.
template <class T>
struct Problem {
  explicit Problem(const DispatchCase& c)
      : tables(tables_of(c.routing)),
        tokens(c.routing.tokens),
        top_k(c.routing.top_k),
        x({tokens, c.width}, /*gap=*/3),
        routed({tables.capacity, c.width}, 5),
        row({tokens, top_k}, 1) {
    x.normal(1);
    set_row(row, tables);
    Buffer<T> values({tables.routed(), c.width});
    values.normal(2);
    for (int64_t r = 0; r < tables.routed(); ++r) {
      for (int64_t d = 0; d < c.width; ++d) {
        routed.view()(r, d) = values.view()(r, d);
      }
    }
  }
  static void set_row(Buffer<int32_t>& row, const RouteTables& tables) {
    row.set(std::vector<double>(tables.row.begin(), tables.row.end()));
  }
  View<const T> tail(const Buffer<T>& by_row) const {
    return by_row.view().slice(0, tables.routed(), tables.capacity);
  }

  RouteTables tables;
  int64_t tokens, top_k;
  Buffer<T> x, routed;
  Buffer<int32_t> row;
};

template <class T>
void forward_copies(const DispatchCase& c) {
  const Problem<T> p(c);
  Buffer<T> out({p.tables.capacity, c.width}, 2);
  const Buffer<T> poison = out;
  dispatch_forward(launch(), p.x.in(), p.row.in(), out.view());
  EXPECT_TRUE(out.guards_intact());
  EXPECT_TRUE(Bitwise(p.tail(out), p.tail(poison)));
  for (int64_t r = 0; r < p.tables.routed(); ++r) {
    const int32_t t = p.tables.token[r];
    ASSERT_TRUE(Bitwise(out.in()[r], p.x.in()[t])) << "row " << r;
  }
}

template <class T>
void backward_sums(const DispatchCase& c) {
  const Problem<T> p(c);
  Buffer<T> dx({p.tokens, c.width}, 2);
  dispatch_backward(launch(), p.routed.in(), p.row.in(), dx.view());
  EXPECT_TRUE(dx.guards_intact());
  for (int64_t t = 0; t < p.tokens; ++t) {
    for (int64_t d = 0; d < c.width; ++d) {
      Accumulator<T> sum = 0;
      for (int64_t k = 0; k < p.top_k; ++k) {
        const int32_t r = p.tables.row[t * p.top_k + k];
        if (r >= 0) sum = sum + Accumulator<T>(p.routed.view()(r, d));
      }
      ASSERT_EQ(dx.view()(t, d), T(sum)) << t << " " << d;
    }
  }
}

class DispatchCases : public testing::TestWithParam<DispatchCase> {};
INSTANTIATE_TEST_SUITE_P(, DispatchCases, testing::ValuesIn(dispatch_cases()),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(DispatchCases, ForwardCopiesRoutedRowsAndLeavesTheRestAlone) {
  forward_copies<float>(GetParam());
  forward_copies<bf16>(GetParam());
  forward_copies<double>(GetParam());
}

TEST_P(DispatchCases, BackwardAddsInSlotOrderAndRoundsOnce) {
  backward_sums<float>(GetParam());
  backward_sums<bf16>(GetParam());
  backward_sums<double>(GetParam());
}

TEST(Dispatch, BackwardIsTheDerivativeOfForward) {
  Problem<double> p({{"", 23, 3, 5, 4, Load::kSomeUnrouted}, 13});
  Buffer<double> dx({p.tokens, 13});
  dispatch_backward(launch(), p.routed.in(), p.row.in(), dx.view());
  const auto loss = [&] {
    Buffer<double> y({p.tables.capacity, 13});
    dispatch_forward(launch(), p.x.in(), p.row.in(), y.view());
    double sum = 0;
    for (int64_t r = 0; r < p.tables.routed(); ++r) {
      for (int64_t d = 0; d < 13; ++d) {
        sum += y.view()(r, d) * p.routed.view()(r, d);
      }
    }
    return sum;
  };
  const auto expected = numeric_gradient(p.x, loss);
  EXPECT_TRUE(Close(dx.values(), expected));
}

TEST(Dispatch, ThreadsDoNotChangeABit) {
  const int64_t width = 211;
  Problem<bf16> p({{"", 301, 4, 16, 9, Load::kSomeUnrouted}, width});
  Buffer<bf16> dx({p.tokens, width}), y({p.tables.capacity, width});
  EXPECT_TRUE(SameForAnyThreads(dx, [&](Launch l) {
    dispatch_backward(l, p.routed.in(), p.row.in(), dx.view());
  }));
  EXPECT_TRUE(SameForAnyThreads(y, [&](Launch l) {
    dispatch_forward(l, p.x.in(), p.row.in(), y.view());
  }));
}

// On the CPU: no other device has so much address space to spare.
TEST(Dispatch, RowsMayLieBeyondTwoToThe31Elements) {
  Threads cpu(1);
  // Three rows, 2^30 floats apart: address space, not memory.
  const int64_t step = int64_t{1} << 30, rows = 3;
  const size_t size = sizeof(float) * (step * (rows - 1) + 8);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const View<float> far(static_cast<float*>(memory), Shape{rows, 8},
                        Shape{step, 1});
  Buffer<float> x({1, 8}), dx({1, 8});
  x.normal(1);
  const std::vector<int32_t> row = {0, 2};
  dispatch_forward(cpu, x.in(), view_of(row, Shape{1, 2}), far);
  dispatch_backward<float>(cpu, far, view_of(row, Shape{1, 2}), dx.view());
  for (int d = 0; d < 8; ++d) {
    EXPECT_EQ(far(2, d), x.view()(0, d));
    EXPECT_EQ(far(1, d), 0);
    EXPECT_EQ(dx.view()(0, d), 2 * x.view()(0, d));
  }
  munmap(memory, size);
}

// On the CPU: elsewhere the host cannot read rows.
TEST(DispatchDeath, RowsOutsideOfTheCapacityAreErrors) {
  Threads cpu(1);
  Buffer<float> x({1, 4}), y({2, 4});
  for (int32_t bad : {2, -2}) {
    const std::vector<int32_t> row = {bad};
    const auto view = view_of(row, Shape{1, 1});
    const std::string message =
        "\\[dispatch\\] row " + std::to_string(bad) + " of 2";
    EXPECT_DEATH(dispatch_forward(cpu, x.in(), view, y.view()), message);
    EXPECT_DEATH(dispatch_backward(cpu, y.in(), view, x.view()), message);
  }
}

TEST(DispatchDeath, ShapesAreNamed) {
  Buffer<float> x({1, 4}), y({2, 5});
  const std::vector<int32_t> row = {0};
  EXPECT_DEATH(
      dispatch_forward(launch(), x.in(), view_of(row, Shape{1, 1}), y.view()),
      "x is f32\\[1, 4\\].*routed x is f32\\[2, 5\\]");
}

}  // namespace
}  // namespace tapeline
