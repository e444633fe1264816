#include "runtime/edit_distance.h"

#include "gtest/gtest.h"

namespace tapeline {
namespace {

TEST(EditDistance, CountsEditsAndSwaps) {
  EXPECT_EQ(edit_distance("", ""), 0);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("abc", ""), 3);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(edit_distance("ab", "ba"), 1);
  EXPECT_EQ(edit_distance("seed", "sede"), 1);
  EXPECT_EQ(edit_distance("ca", "abc"), 3);  // alignment, not free transposes
}

const std::vector<std::string> kKeys = {
    "seed",        "optimizer.lr", "optimizer.beta1", "optimizer.beta2",
    "train.steps", "schedule.name"};

TEST(DidYouMean, FindsTheNearest) {
  EXPECT_EQ(did_you_mean("optimiser.lr", kKeys), "optimizer.lr");
  EXPECT_EQ(did_you_mean("train.stpes", kKeys), "train.steps");
  EXPECT_EQ(did_you_mean("sed", kKeys), "seed");
}

TEST(DidYouMean, FirstOfEqualsWins) {
  EXPECT_EQ(did_you_mean("optimizer.beta", kKeys), "optimizer.beta1");
}

TEST(DidYouMean, FindsTheLastPartElsewhere) {
  EXPECT_EQ(did_you_mean("lr", kKeys), "optimizer.lr");
  EXPECT_EQ(did_you_mean("training.learning.steps", kKeys), "train.steps");
}

TEST(DidYouMean, SaysNothingWhenNothingIsNear) {
  EXPECT_EQ(did_you_mean("wallpaper", kKeys), "");
  EXPECT_EQ(did_you_mean("", kKeys), "");
  EXPECT_EQ(did_you_mean("seed", {}), "");
  EXPECT_EQ(suggestion("wallpaper", kKeys), "");
  EXPECT_EQ(suggestion("sede", kKeys), "; did you mean 'seed'?");
}

}  // namespace
}  // namespace tapeline
