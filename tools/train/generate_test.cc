#include "tools/train/generate.h"

#include <cmath>
#include <map>
#include <vector>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

TEST(ChooseToken, GreedyTakesTheLargestAndTheLowestOfEquals) {
  EXPECT_EQ(choose_token({1, 5, 2, 5}, {.temperature = 0}, 9), 1);
}

// Frequencies over many draws against the probabilities.
std::map<int32_t, double> shares(const std::vector<float>& logits,
                                 const GenerateOptions& options) {
  constexpr int kDraws = 20000;
  std::map<int32_t, double> share;
  for (int i = 0; i < kDraws; ++i) {
    share[choose_token(logits, options, static_cast<uint64_t>(i))] +=
        1.0 / kDraws;
  }
  return share;
}

TEST(ChooseToken, DrawsFromTheSoftmaxAtItsTemperature) {
  // e^(l / 2): 1, 2, 5 of 8.
  const std::vector<float> logits = {0, 2 * std::log(2.0f), 2 * std::log(5.0f)};
  auto share = shares(logits, {.temperature = 2, .seed = 4});
  EXPECT_NEAR(share[0], 1 / 8.0, 0.01);
  EXPECT_NEAR(share[1], 2 / 8.0, 0.01);
  EXPECT_NEAR(share[2], 5 / 8.0, 0.01);
}

TEST(ChooseToken, TopPKeepsTheLeastTokensThatReachItsMass) {
  const std::vector<float> logits = {0, std::log(2.0f), std::log(5.0f)};
  auto share = shares(logits, {.temperature = 1, .top_p = 0.7});
  EXPECT_EQ(share.count(0), 0u);
  EXPECT_NEAR(share[1], 2 / 7.0, 0.012);
  EXPECT_NEAR(share[2], 5 / 7.0, 0.012);
  // The likeliest stays however small top_p is.
  share = shares(logits, {.temperature = 1, .top_p = 1e-9});
  EXPECT_EQ(share[2], shares(logits, {.temperature = 0})[2]);
}

TEST(Bytes, AreTheirIdsBothWays) {
  const std::string text("a\xff\n\0b", 5);
  EXPECT_EQ(byte_ids(text), (std::vector<int32_t>{97, 255, 10, 0, 98}));
  EXPECT_EQ(byte_text({97, 255, 10, 0, 300, 98}), text);
}

}  // namespace
}  // namespace tapeline
