// The auxiliary losses against torch's values of a small glm_moe_dsa model.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/aux_loss/aux_loss.h"
#include "runtime/safetensors.h"
#include "tests/support/buffer.h"

namespace tapeline {
namespace {

const SafetensorsReader& golden_file() {
  static const auto file =
      SafetensorsReader::open("tests/data/glm/fp32/router_aux.safetensors");
  CHECK(file.ok()) << file.status();
  return *file;
}
template <class T>
std::vector<T> golden(const std::string& name) {
  return golden_file().read_tensor(name)->to_vector<T>();
}

// Four layers of 48 tokens in two sequences, 8 experts, two per token; computed
// by torch in fp32.
class AuxLossGolden : public testing::TestWithParam<int> {
 protected:
  AuxLossGolden() : suffix(".") { suffix += std::to_string(GetParam()); }

  template <class T>
  View<const T> load(const std::string& name, const Shape& shape,
                     std::vector<T>& values) const {
    values = golden<T>(name + suffix);
    return view_of(std::as_const(values), shape);
  }
  void expect_loss(const std::string& name, const Buffer<float>& loss,
                   const Buffer<float>& dlogits) const {
    const float value = golden<float>(name + suffix)[0];
    EXPECT_NEAR(loss.view()(0), value, 1e-6 * std::abs(value)) << name;
    const auto gradient = golden<float>(name + ".grad_logits" + suffix);
    const std::vector<double> got = dlogits.values();
    float largest = 0;
    for (float g : gradient) largest = std::max(largest, std::abs(g));
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], gradient[i], 2e-6 * largest) << name << " " << i;
    }
  }
  std::string suffix;
};
INSTANTIATE_TEST_SUITE_P(, AuxLossGolden, testing::Values(2, 3, 4, 5));

TEST_P(AuxLossGolden, FollowsTorch) {
  std::vector<float> logits, bias;
  std::vector<int32_t> ids;
  const auto logits_TE = load("router_logits", Shape{48, 8}, logits);
  const auto bias_E = load("bias_before", Shape{8}, bias);
  const auto ids_TK = load("router_ids", Shape{48, 2}, ids);
  const std::vector<int32_t> starts = golden<int32_t>("cu_seqlens");
  Buffer<float> loss({1}), dlogits({48, 8});

  Buffer<int32_t> counts({8}), by_sequence({2, 8});
  count_experts(launch(), ids_TK, {}, counts.view());
  const std::vector<int32_t> c = golden<int32_t>("counts" + suffix);
  EXPECT_EQ(counts.values(), std::vector<double>(c.begin(), c.end()));

  for (auto [name, kind] :
       {std::pair{"bal_unbiased", BalanceKind::kSigmoid},
        std::pair{"bal_biased", BalanceKind::kBiasedSigmoid}}) {
    balance_loss_forward(launch(), kind, logits_TE, bias_E, counts.in(), {},
                         loss.view());
    balance_loss_backward(launch(), 1, kind, logits_TE, bias_E, counts.in(), {},
                          dlogits.view());
    expect_loss(name, loss, dlogits);
  }

  const TokenSet set = {.sequence_S1 = view_of(starts, Shape{3})};
  count_experts(launch(), ids_TK, set, by_sequence.view());
  balance_loss_forward(launch(), BalanceKind::kSigmoid, logits_TE, {},
                       by_sequence.in(), set, loss.view());
  balance_loss_backward(launch(), 1, BalanceKind::kSigmoid, logits_TE, {},
                        by_sequence.in(), set, dlogits.view());
  expect_loss("bal_seqwise", loss, dlogits);

  z_loss_forward(launch(), logits_TE, {}, loss.view());
  z_loss_backward(launch(), 1, logits_TE, {}, dlogits.view());
  expect_loss("zloss", loss, dlogits);

  const std::vector<int64_t> wide(c.begin(), c.end());
  update_router_bias(launch(), view_of(wide, Shape{8}), 1e-3,
                     view_of(bias, Shape{8}));
  EXPECT_EQ(bias, golden<float>("bias_after" + suffix));
}

}  // namespace
}  // namespace tapeline
