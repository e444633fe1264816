#include "kernels/attention/tile.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/attention/row_tile.h"
#include "kernels/attention/rows.h"
#include "tests/support/buffer.h"

namespace tapeline::internal {
namespace {

template <class A>
Rows<A> rows(Buffer<A>& x) {
  return {x.view().data, x.view().strides[0]};
}
template <class A>
constexpr double kStep = sizeof(A) == 4 ? 0x1p-24 : 0x1p-53;

template <class A>
void expect_dots(int64_t m, int64_t n, int64_t d) {
  Buffer<A> a({m, d}, 3), b({n, d}, 2), c({m, n}, 1);
  a.normal(1);
  b.normal(2);
  dots<A>(m, n, d, rows(a), rows(b), rows(c));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0, size = 0;
      for (int64_t k = 0; k < d; ++k) {
        const double term = double(a.view()(i, k)) * double(b.view()(j, k));
        sum += term;
        size += std::abs(term);
      }
      EXPECT_NEAR(c.view()(i, j), sum, size * 8 * kStep<A>)
          << m << " " << n << " " << d;
    }
  }
  EXPECT_TRUE(c.guards_intact());
}

// Sizes around the blocks of 4 rows, 2 and 4 columns and 8 (4 in f64) lanes.
constexpr int64_t kSizes[] = {1, 2, 3, 4, 5, 7, 8, 9};
constexpr int64_t kLengths[] = {0, 1, 3, 4, 7, 8, 9, 31, 33, 80};

TEST(Tile, DotsAreInnerProducts) {
  for (int64_t m : kSizes) {
    for (int64_t n : kSizes) {
      for (int64_t d : kLengths) {
        expect_dots<float>(m, n, d);
        expect_dots<double>(m, n, d);
      }
    }
  }
}

TEST(Tile, DotsDoNotDependOnTheirNeighbours) {
  Buffer<float> a({9, 37}, 3), b({11, 37}), c({9, 11}), one({1, 1});
  a.normal(1);
  b.normal(2);
  dots<float>(9, 11, 37, rows(a), rows(b), rows(c));
  for (int64_t i = 0; i < 9; ++i) {
    for (int64_t j = 0; j < 11; ++j) {
      dots<float>(1, 1, 37, Rows<const float>(rows(a)).from(i),
                  Rows<const float>(rows(b)).from(j), rows(one));
      EXPECT_EQ(c.view()(i, j), one.view()(0, 0)) << i << " " << j;
    }
  }
}

// k = 0, 1, ... with one fused operation each: the same bits as the plain loop.
template <class A>
void expect_product(int64_t m, int64_t n, int64_t k, bool turned) {
  Buffer<A> a(turned ? Shape{k, m} : Shape{m, k}, 3), b({k, n}, 2),
      c({m, n}, 1);
  a.normal(1);
  b.normal(2);
  c.normal(3);
  std::vector<double> expected;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      A sum = c.view()(i, j);
      for (int64_t l = 0; l < k; ++l) {
        const A x = turned ? a.view()(l, i) : a.view()(i, l);
        sum = std::fma(x, b.view()(l, j), sum);
      }
      expected.push_back(sum);
    }
  }
  add_product<A>(m, n, k, turned ? transposed(rows(a)) : plain(rows(a)),
                 rows(b), rows(c));
  EXPECT_EQ(c.values(), expected) << m << " " << n << " " << k;
  EXPECT_TRUE(c.guards_intact());
}

TEST(Tile, ProductsAddTermsInOrder) {
  for (int64_t m : kSizes) {
    for (int64_t n : {1, 3, 8, 15, 16, 17, 63, 64, 65, 127}) {
      for (int64_t k : {0, 1, 5}) {
        for (bool turned : {false, true}) {
          expect_product<float>(m, n, k, turned);
          expect_product<double>(m, n, k, turned);
        }
      }
    }
  }
}

// Every pair that a row sees is visited once, in ascending order for the row
// and for the key.
TEST(RowTile, RectanglesCoverWhatRowsSee) {
  std::mt19937 engine(5);
  for (int trial = 0; trial < 500; ++trial) {
    const int count = 1 + static_cast<int>(engine() % kRowTile);
    std::vector<int32_t> begin(count), end(count);
    for (int t = 0; t < count; ++t) {
      // Half of the trials: mostly one window, as in causal attention.
      begin[t] = trial % 2 ? 60 + engine() % 4 : engine() % 200;
      end[t] = trial % 2 ? 66 + t : engine() % 200;
    }
    const KeyRange range{view_of(begin, {count}), view_of(end, {count})};
    const RowTile tile = row_tile(range, 1, 0, count);
    const int64_t key = 64;
    const int keys = 57;
    Span span[kRowTile];
    for (int m = 0; m < count; ++m) span[m] = tile.span(m, key, keys);
    std::vector<std::vector<int>> keys_of(count), rows_of(keys);
    visit_rectangles(span, count, [&](int m, int rows, Span s) {
      for (int i = m; i < m + rows; ++i) {
        for (int j = s.begin; j < s.end; ++j) {
          keys_of[i].push_back(j);
          rows_of[j].push_back(i);
        }
      }
    });
    for (int m = 0; m < count; ++m) {
      std::vector<int> expected;
      for (int j = 0; j < keys; ++j) {
        if (begin[m] <= key + j && key + j < end[m]) expected.push_back(j);
      }
      EXPECT_EQ(keys_of[m], expected) << trial << " row " << m;
    }
    for (const std::vector<int>& r : rows_of) {
      EXPECT_TRUE(std::is_sorted(r.begin(), r.end())) << trial;
    }
  }
}

}  // namespace
}  // namespace tapeline::internal
