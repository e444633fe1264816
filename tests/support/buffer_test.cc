#include "tests/support/buffer.h"

#include <cmath>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

TEST(Buffer, StartsAsPoison) {
  const Buffer<float> f({2, 3}, 1);
  const Buffer<bf16> b({2, 3});
  const Buffer<double> d({2, 3});
  const Buffer<int32_t> i({2, 3});
  for (double v : f.values()) EXPECT_TRUE(std::isnan(v));
  for (double v : b.values()) EXPECT_TRUE(std::isnan(v));
  for (double v : d.values()) EXPECT_TRUE(std::isnan(v));
  for (double v : i.values()) EXPECT_GT(v, 1e9);
}

TEST(Buffer, RowsAreStridedAndRoundTrip) {
  Buffer<bf16> x({2, 2, 3}, 5);
  EXPECT_EQ(x.view().strides, (Shape{16, 8, 1}));
  const std::vector<double> values = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, -0.5};
  x.set(values);
  EXPECT_EQ(x.values(), values);
  EXPECT_EQ(float{x.view()(1, 1, 2)}, -0.5f);
  EXPECT_TRUE(x.guards_intact());
}

TEST(Buffer, GuardsSeeAWriteBesideAnyRow) {
  for (const int64_t at : {-1, 3, 7, 8}) {  // before, in the gaps, behind
    Buffer<float> x({2, 3}, 1);
    EXPECT_TRUE(x.guards_intact());
    x.view().data[at] = 0;
    EXPECT_FALSE(x.guards_intact()) << at;
  }
}

TEST(Buffer, NormalValuesAreExactInBf16) {
  Buffer<double> x({1000});
  double sum = 0, squares = 0;
  for (double v : x.normal(1).values()) {
    EXPECT_EQ(double{float{bf16(static_cast<float>(v))}}, v);
    sum += v;
    squares += v * v;
  }
  EXPECT_NEAR(sum / 1000, 0, 0.15);
  EXPECT_NEAR(squares / 1000, 1, 0.2);
}

}  // namespace
}  // namespace tapeline
