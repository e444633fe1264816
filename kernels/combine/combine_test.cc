#include "kernels/combine/combine.h"

#include <sys/mman.h>

#include <vector>

#include "gtest/gtest.h"
#include "kernels/combine/combine_cases.h"
#include "tests/support/buffer.h"
#include "tests/support/close.h"
#include "tests/support/finite_differences.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

// One routing with its inputs. Rows beyond the routed ones and weights of
// unrouted slots stay poison: nothing may read them.
template <class T>
struct Problem {
  using A = Accumulator<T>;

  explicit Problem(const CombineCase& c)
      : tables(tables_of(c.routing)),
        tokens(c.routing.tokens),
        top_k(c.routing.top_k),
        width(c.width),
        x({tables.capacity, width}, /*gap=*/3),
        dy({tokens, width}, 5),
        weight({tokens, top_k}, 1),
        row({tokens, top_k}, 2) {
    dy.normal(1);
    row.set(std::vector<double>(tables.row.begin(), tables.row.end()));
    Buffer<T> values({tables.routed(), width});
    values.normal(2);
    for (int64_t r = 0; r < tables.routed(); ++r) {
      for (int64_t d = 0; d < width; ++d) {
        x.view()(r, d) = values.view()(r, d);
      }
    }
    Buffer<A> weights({tokens, top_k});
    weights.normal(3);
    for (int64_t i = 0; i < tokens * top_k; ++i) {
      const int64_t t = i / top_k, k = i % top_k;
      if (tables.row[i] >= 0) weight.view()(t, k) = weights.view()(t, k);
    }
  }
  View<const T> tail(const Buffer<T>& by_row) const {
    return by_row.view().slice(0, tables.routed(), tables.capacity);
  }

  void forward(Launch l, Buffer<T>& y) const {
    combine_forward(l, x.in(), weight.in(), row.in(), y.view());
    EXPECT_TRUE(y.guards_intact());
  }
  void backward(Launch l, Buffer<T>& dx, Buffer<A>& dweight) const {
    combine_backward(l, dy.in(), x.in(), weight.in(), row.in(), dx.view(),
                     dweight.view());
    EXPECT_TRUE(dx.guards_intact());
    EXPECT_TRUE(dweight.guards_intact());
  }

  RouteTables tables;
  int64_t tokens, top_k, width;
  Buffer<T> x, dy;
  Buffer<A> weight;
  Buffer<int32_t> row;
};

template <class T>
void forward_sums(const CombineCase& c) {
  const Problem<T> p(c);
  Buffer<T> y({p.tokens, p.width}, 2);
  p.forward(launch(), y);
  Buffer<double> expected({p.tokens, p.width});
  for (int64_t t = 0; t < p.tokens; ++t) {
    for (int64_t d = 0; d < p.width; ++d) {
      double sum = 0;
      for (int64_t k = 0; k < p.top_k; ++k) {
        const int32_t r = p.tables.row[t * p.top_k + k];
        if (r < 0) continue;
        sum += double(p.weight.view()(t, k)) * double(p.x.view()(r, d));
      }
      expected.view()(t, d) = sum;
    }
  }
  EXPECT_TRUE(Close(y.in(), expected.in(), {.sum_length = p.top_k}));
}

template <class T>
void backward_gathers(const CombineCase& c) {
  using A = Accumulator<T>;
  const Problem<T> p(c);
  Buffer<T> dx({p.tables.capacity, p.width}, 4);
  Buffer<A> dweight({p.tokens, p.top_k}, 1);
  const Buffer<T> poison = dx;
  p.backward(launch(), dx, dweight);
  EXPECT_TRUE(Bitwise(p.tail(dx), p.tail(poison)));
  std::vector<double> expected;
  for (int64_t t = 0; t < p.tokens; ++t) {
    for (int64_t k = 0; k < p.top_k; ++k) {
      const int32_t r = p.tables.row[t * p.top_k + k];
      double sum = 0;
      for (int64_t d = 0; r >= 0 && d < p.width; ++d) {
        sum += double(p.dy.view()(t, d)) * double(p.x.view()(r, d));
        // One product, rounded once: exact.
        const A product = p.weight.view()(t, k) * A(p.dy.view()(t, d));
        ASSERT_EQ(dx.view()(r, d), T(product));
      }
      expected.push_back(sum);
    }
  }
  // As one row, since a lone sum may come out small by cancellation.
  std::vector<A> got;
  for (double v : dweight.values()) got.push_back(A(v));
  EXPECT_TRUE(Close(got, expected, {.sum_length = p.width}));
  for (size_t i = 0; i < got.size(); ++i) {
    if (p.tables.row[i] < 0) {
      EXPECT_EQ(got[i], 0);
    }
  }
}

class CombineCases : public testing::TestWithParam<CombineCase> {};
INSTANTIATE_TEST_SUITE_P(, CombineCases, testing::ValuesIn(combine_cases()),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(CombineCases, ForwardIsTheWeightedSumOfTheTokensRows) {
  forward_sums<float>(GetParam());
  forward_sums<bf16>(GetParam());
  forward_sums<double>(GetParam());
}

TEST_P(CombineCases, BackwardWritesRoutedRowsAndEveryWeight) {
  backward_gathers<float>(GetParam());
  backward_gathers<bf16>(GetParam());
  backward_gathers<double>(GetParam());
}

TEST(Combine, BackwardIsTheDerivativeOfForward) {
  Problem<double> p({{"", 17, 3, 5, 0, Load::kRandom}, 11});
  Buffer<double> dx({p.tables.capacity, p.width}), dweight({p.tokens, p.top_k});
  p.backward(launch(), dx, dweight);
  const auto loss = [&] {
    Buffer<double> y({p.tokens, p.width});
    p.forward(launch(), y);
    return inner_product(y, p.dy);
  };
  EXPECT_TRUE(Close(dx.values(), numeric_gradient(p.x, loss)));
  EXPECT_TRUE(Close(dweight.values(), numeric_gradient(p.weight, loss)));
}

TEST(Combine, SlotsAreAddedInAscendingOrder) {
  // In f32: (1e8 - 1e8) + 1 is 1, but 1e8 + (-1e8 + 1) is 0.
  const std::vector<float> x = {-1e8f, 1.0f, 1e8f}, weight = {1, 1, 1};
  const std::vector<int32_t> row = {2, 0, 1};
  Buffer<float> y({1, 1});
  combine_forward(launch(), view_of(x, Shape{3, 1}),
                  view_of(weight, Shape{1, 3}), view_of(row, Shape{1, 3}),
                  y.view());
  EXPECT_EQ(y.view()(0, 0), 1);
}

TEST(Combine, ThreadsDoNotChangeABit) {
  const Problem<bf16> p({{"", 301, 4, 16, 9, Load::kSomeUnrouted}, 211});
  Buffer<bf16> y({p.tokens, p.width}), dx({p.tables.capacity, p.width});
  Buffer<float> dweight({p.tokens, p.top_k});
  EXPECT_TRUE(SameForAnyThreads(y, [&](Launch l) { p.forward(l, y); }));
  EXPECT_TRUE(
      SameForAnyThreads(dx, [&](Launch l) { p.backward(l, dx, dweight); }));
  EXPECT_TRUE(SameForAnyThreads(dweight,
                                [&](Launch l) { p.backward(l, dx, dweight); }));
}

// On the CPU: no other device has so much address space to spare.
TEST(Combine, RowsMayLieBeyondTwoToThe31Elements) {
  Threads cpu(1);
  // Three rows, 2^30 floats apart: address space, not memory.
  const int64_t step = int64_t{1} << 30, rows = 3;
  const size_t size = sizeof(float) * (step * (rows - 1) + 8);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const View<float> far(static_cast<float*>(memory), Shape{rows, 8},
                        Shape{step, 1});
  for (int d = 0; d < 8; ++d) far(2, d) = 1;
  const std::vector<float> weight = {3, 5};
  const std::vector<int32_t> row = {0, 2};
  Buffer<float> dy({1, 8}), y({1, 8}), dweight({1, 2});
  dy.set({1, 2, 3, 4, 5, 6, 7, 8});
  combine_forward<float>(cpu, far, view_of(weight, Shape{1, 2}),
                         view_of(row, Shape{1, 2}), y.view());
  combine_backward<float>(cpu, dy.in(), far, view_of(weight, Shape{1, 2}),
                          view_of(row, Shape{1, 2}), far, dweight.view());
  for (int d = 0; d < 8; ++d) {
    EXPECT_EQ(y.view()(0, d), 5);
    EXPECT_EQ(far(2, d), 5 * (d + 1));
  }
  EXPECT_EQ(dweight.values(), (std::vector<double>{0, 36}));
  munmap(memory, size);
}

TEST(CombineDeath, ShapesAreNamed) {
  Buffer<float> x({2, 4}), weight({1, 2}), y({1, 4});
  const std::vector<int32_t> row(1);
  EXPECT_DEATH(combine_forward(launch(), x.in(), weight.in(),
                               view_of(row, Shape{1, 1}), y.view()),
               "weight is f32\\[1, 2\\], row is i32\\[1, 1\\]");
}

// On the CPU: elsewhere the host cannot read rows.
TEST(CombineDeath, RowsOutsideOfTheCapacityAreErrors) {
  Threads cpu(1);
  Buffer<float> x({2, 4}), weight({1, 1}), y({1, 4}), dweight({1, 1});
  for (int32_t bad : {2, -2}) {
    const std::vector<int32_t> row = {bad};
    const auto view = view_of(row, Shape{1, 1});
    const std::string message =
        "\\[combine\\] row " + std::to_string(bad) + " of 2";
    EXPECT_DEATH(combine_forward(cpu, x.in(), weight.in(), view, y.view()),
                 message);
    EXPECT_DEATH(combine_backward(cpu, y.in(), x.in(), weight.in(), view,
                                  x.view(), dweight.view()),
                 message);
  }
}

}  // namespace
}  // namespace tapeline
