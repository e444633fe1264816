// The code of README.md and docs/write_a_model.md, as printed there.
#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "tests/docs/tiny_lm.h"        // NOLINT: extracted from the document
#include "tests/docs/tiny_lm_train.h"  // NOLINT

namespace readme {
#include "tests/docs/readme_moe.h"
}  // namespace readme

namespace {

TEST(Documents, TheFortyLineModelLearns) {
  const std::vector<float> losses = train_tiny_lm(100);
  EXPECT_NEAR(losses.front(), std::log(16.0f), 0.5f);
  EXPECT_LT(losses.back(), 0.1f);
}

TEST(Documents, TheReadmeLayerHasGradients) {
  readme::MoeFeedForward layer{.dim = 8, .experts = 4, .hidden = 6};
  std::vector<tapeline::NamedTensor> tensors = tapeline::name_tensors(layer);
  tapeline::initialize(tensors, tapeline::DType::kF32, 1, 0.5);
  std::vector<float> values;
  for (int i = 0; i < 40; ++i) values.push_back(std::sin(1.0f + i));
  const tapeline::Tensor x = tapeline::Tensor::from(values, {5, 8});
  auto [y, tape] = tapeline::record([&] { return tapeline::sum(layer(x)); });
  tapeline::ParameterGradients grads;
  tape.backward(y, grads);
  for (auto& [path, parameter] : tapeline::parameters(layer)) {
    EXPECT_TRUE(grads.reached(*parameter)) << path;
  }
}

}  // namespace
