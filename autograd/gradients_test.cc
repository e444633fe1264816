#include "autograd/gradients.h"

#include "gtest/gtest.h"
#include "runtime/access.h"

namespace tapeline {
namespace {

Parameter parameter(const std::vector<float>& values) {
  const Shape shape = {static_cast<int64_t>(values.size())};
  Parameter p(shape);
  p.set_value("p", Tensor::from(values, shape));
  return p;
}

void add_to(ParameterGradients& grads, const Parameter& p, int site,
            float amount) {
  const Tensor& sum = grads.accumulator(p, site);
  std::vector<float> values = sum.to_vector<float>();
  for (float& value : values) value += amount;
  sum.assign(values);
}

TEST(ParameterGradients, StartsAtZeroInFp32) {
  ParameterGradients grads;
  const Parameter p = parameter({1, 2});
  EXPECT_FALSE(grads.reached(p));
  EXPECT_FALSE(grads.combined(p));
  const Tensor sum = grads.accumulator(p, 0);
  EXPECT_EQ(sum.dtype(), DType::kF32);
  EXPECT_EQ(sum.storage()->tag(), Tag::kGradient);
  EXPECT_EQ(sum.to_vector<float>(), (std::vector<float>{0, 0}));
  EXPECT_TRUE(grads.reached(p));
}

TEST(ParameterGradients, AreF64BesideF64AndF32BesideBf16) {
  ParameterGradients grads;
  Parameter wide(Shape{1}), narrow(Shape{1});
  wide.set_value("wide", Tensor::zeros({1}, DType::kF64));
  narrow.set_value("narrow", Tensor::zeros({1}, DType::kBf16));
  EXPECT_EQ(grads.accumulator(wide, 0).dtype(), DType::kF64);
  EXPECT_EQ(grads.accumulator(narrow, 0).dtype(), DType::kF32);
}

// 1e8 + 1 - 1e8 is 0 or 1 in fp32 by the order of additions: sites add as
// ((site 0 + site 2) + site 7) whichever was used first.
TEST(ParameterGradients, AddsSitesInTheirOrderWhateverWasUsedFirst) {
  const std::vector<std::vector<std::pair<int, float>>> orders = {
      {{0, 1e8f}, {2, -1e8f}, {7, 1}},
      {{7, 1}, {0, 1e8f}, {2, -1e8f}},
      {{2, -1e8f}, {7, 1}, {0, 1e8f}}};
  for (const auto& order : orders) {
    ParameterGradients grads;
    const Parameter p = parameter({5});
    for (const auto& [site, amount] : order) add_to(grads, p, site, amount);
    EXPECT_EQ(grads.combined(p).to_vector<float>(), std::vector<float>{1});
    // Once more: nothing is counted twice.
    EXPECT_EQ(grads.combined(p).to_vector<float>(), std::vector<float>{1});
  }
}

TEST(ParameterGradients, CombinesSitesWithoutTheFirst) {
  ParameterGradients grads;
  const Parameter p = parameter({5});
  add_to(grads, p, 3, 2);
  add_to(grads, p, 9, 4);
  EXPECT_EQ(grads.combined(p).to_vector<float>(), std::vector<float>{6});
}

TEST(ParameterGradients, ZeroForgetsSumsAndKeepsMemory) {
  ParameterGradients grads;
  const Parameter p = parameter({5}), q = parameter({6});
  add_to(grads, p, 0, 1);
  add_to(grads, p, 1, 2);
  add_to(grads, q, 0, 3);
  const uint64_t storage = grads.accumulator(p, 1).storage()->id();
  grads.zero();
  EXPECT_FALSE(grads.reached(p));
  EXPECT_FALSE(grads.combined(q));
  const int64_t storages = Storage::live();
  add_to(grads, p, 0, 10);
  add_to(grads, p, 1, 20);
  EXPECT_EQ(grads.accumulator(p, 1).storage()->id(), storage);
  EXPECT_EQ(Storage::live(), storages);
  EXPECT_EQ(grads.combined(p).to_vector<float>(), std::vector<float>{30});
  EXPECT_FALSE(grads.combined(q));
}

TEST(ParameterGradients, AfterZeroAFoldedSiteStartsAtZeroToo) {
  ParameterGradients grads;
  const Parameter p = parameter({5});
  add_to(grads, p, 0, 1);
  add_to(grads, p, 1, 2);
  grads.combined(p);
  grads.zero();
  add_to(grads, p, 1, 7);
  EXPECT_EQ(grads.combined(p).to_vector<float>(), std::vector<float>{7});
}

TEST(ParameterGradients, DoNotMistakeANewParameterForADeadOne) {
  ParameterGradients grads;
  for (int i = 1; i <= 20; ++i) {
    const Parameter p = parameter(std::vector<float>(static_cast<size_t>(i)));
    add_to(grads, p, 0, 1);
    EXPECT_EQ(grads.combined(p).elements(), i);
    EXPECT_EQ(grads.combined(p).to_vector<float>()[0], 1);
  }
}

TEST(ParameterGradients, CopiesOfAParameterAreOne) {
  ParameterGradients grads;
  const Parameter p = parameter({5});
  const Parameter copy = p;
  add_to(grads, p, 0, 1);
  add_to(grads, copy, 0, 2);
  EXPECT_EQ(grads.combined(p).to_vector<float>(), std::vector<float>{3});
}

}  // namespace
}  // namespace tapeline
