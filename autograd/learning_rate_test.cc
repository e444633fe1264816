#include "autograd/learning_rate.h"

#include <cmath>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

using Kind = LearningRate::Kind;

LearningRate rate(Kind kind) {
  return {.kind = kind,
          .lr = 8e-3,
          .min_lr = 2e-3,
          .warmup_steps = 4,
          .total_steps = 16,
          .decay_steps = 6};
}

TEST(LearningRate, WarmsUpFromTheFirstStep) {
  for (Kind kind :
       {Kind::kConstant, Kind::kLinear, Kind::kCosine, Kind::kWsd}) {
    SCOPED_TRACE(name_of(kind));
    EXPECT_DOUBLE_EQ(rate(kind).at(1), 2e-3);
    EXPECT_DOUBLE_EQ(rate(kind).at(3), 6e-3);
    EXPECT_DOUBLE_EQ(rate(kind).at(4), 8e-3);
  }
}

TEST(LearningRate, ConstantStaysAfterTheWarmUp) {
  EXPECT_EQ(rate(Kind::kConstant).at(5), 8e-3);
  EXPECT_EQ(rate(Kind::kConstant).at(1000), 8e-3);
}

TEST(LearningRate, LinearFallsByEqualSteps) {
  const LearningRate r = rate(Kind::kLinear);
  for (int s = 4; s <= 16; ++s)
    EXPECT_NEAR(r.at(s), 8e-3 - (s - 4) * 5e-4, 1e-15);
}

// Values of torch.optim.lr_scheduler.CosineAnnealingLR(T_max=12, eta_min=2e-3).
TEST(LearningRate, CosineMatchesTorch) {
  const LearningRate r = rate(Kind::kCosine);
  EXPECT_NEAR(r.at(5), 0.007897777478867205, 1e-15);
  EXPECT_NEAR(r.at(7), 0.0071213203435596425, 1e-15);
  EXPECT_NEAR(r.at(10), 0.005, 1e-15);
  EXPECT_NEAR(r.at(13), 0.0028786796564403575, 1e-15);
}

TEST(LearningRate, WsdIsStableThenFallsLinearly) {
  const LearningRate r = rate(Kind::kWsd);
  EXPECT_EQ(r.at(10), 8e-3);
  EXPECT_NEAR(r.at(11), 7e-3, 1e-15);
  EXPECT_NEAR(r.at(13), 5e-3, 1e-15);
}

TEST(LearningRate, TheLastStepHasTheLeastRateAndLaterOnesKeepIt) {
  for (Kind kind : {Kind::kLinear, Kind::kCosine, Kind::kWsd}) {
    SCOPED_TRACE(name_of(kind));
    EXPECT_NEAR(rate(kind).at(16), 2e-3, 1e-18);
    EXPECT_EQ(rate(kind).at(99), rate(kind).at(16));
  }
}

TEST(LearningRate, WithoutWarmUpTheFirstStepIsPartOfTheDecay) {
  LearningRate r = rate(Kind::kLinear);
  r.warmup_steps = 0;
  r.total_steps = 4;
  EXPECT_NEAR(r.at(1), 6.5e-3, 1e-15);
  EXPECT_NEAR(r.at(4), 2e-3, 1e-15);
}

TEST(LearningRate, SaysWhatContradicts) {
  EXPECT_TRUE(rate(Kind::kWsd).check().ok());
  LearningRate r = rate(Kind::kWsd);
  r.decay_steps = 13;
  EXPECT_EQ(r.check().message(),
            "learning rate: warm-up and decay take 17 steps, but the run has "
            "16");
  r = rate(Kind::kCosine);
  r.min_lr = 1e-2;
  EXPECT_EQ(r.check().message(),
            "learning rate: min_lr is 0.01; it must be between 0 and lr = "
            "0.008");
  r = rate(Kind::kConstant);
  r.lr = NAN;
  EXPECT_FALSE(r.check().ok());
}

}  // namespace
}  // namespace tapeline
