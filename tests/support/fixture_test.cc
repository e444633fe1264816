#include "tests/support/fixture.h"

#include "gtest/gtest.h"

namespace tapeline {
namespace {

TEST(Fixture, ReadsTensorsByName) {
  const Fixture misc = Fixture::open("tests/data/ops/misc.safetensors");
  EXPECT_TRUE(misc.has("rope.pos"));
  EXPECT_FALSE(misc.has("rope.none"));
  EXPECT_EQ(misc.shape("rope.x"), (Shape{16, 2, 64}));
  EXPECT_EQ(misc.ints("rope.pos")[10], 1000000);
  EXPECT_EQ(misc.values("rope.pos")[10], 1000000);
  EXPECT_EQ(misc.floats("rope.cos")[0], 1.0f);
}

TEST(FixtureDeathTest, NamesWhatIsMissing) {
  EXPECT_DEATH(Fixture::open("tests/data/ops/none.safetensors"), "none");
  const Fixture misc = Fixture::open("tests/data/ops/misc.safetensors");
  EXPECT_DEATH(misc.values("rms.q"), "rms.q");
  EXPECT_DEATH(misc.ints("rms.x"), "rms.x is F32, wanted I32");
}

}  // namespace
}  // namespace tapeline
