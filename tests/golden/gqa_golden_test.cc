// Qwen3, Qwen3-MoE and Llama against values that transformers 5.17 computed.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "autograd/tape.h"
#include "gtest/gtest.h"
#include "models/gqa_lm.h"
#include "models/llama.h"
#include "models/qwen3.h"
#include "models/qwen3_moe.h"
#include "tests/golden/golden.h"

namespace tapeline {
namespace {

struct Family {
  std::string name;
  absl::StatusOr<GqaLmConfig> (*parse)(const Json&);
  int gradients;  // tensors of the golden
};

class Gqa : public testing::TestWithParam<Family> {
 protected:
  std::string folder() const {
    return "tests/data/" + GetParam().name + "/fp32/";
  }
  GqaLm load_model() const {
    absl::StatusOr<GqaLmConfig> config =
        GetParam().parse(golden_config(folder()));
    CHECK(config.ok()) << config.status().message();
    GqaLm model{std::make_shared<const GqaLmConfig>(*std::move(config))};
    CHECK_OK(load(model.named_tensors(), DType::kF32,
                  open_golden(folder() + "model.safetensors")));
    return model;
  }
};
INSTANTIATE_TEST_SUITE_P(Families, Gqa,
                         testing::Values(Family{"qwen3", parse_qwen3, 35},
                                         Family{"qwen3moe", parse_qwen3_moe,
                                                80},
                                         Family{"llama", parse_llama, 30}),
                         [](const auto& info) { return info.param.name; });

TEST_P(Gqa, LogitsLossAndGradientsAreThoseOfTransformers) {
  GqaLm model = load_model();
  const SafetensorsReader file = open_golden(folder() + "main.safetensors");
  const HostBatch host = golden_batch(file);
  const Batch batch =
      make_batch(host, count_targets({host}, 0), 0, DType::kF32);
  Context ctx;
  ctx.sequence = Sequence::packed(host.cu_seqlens);
  model.prepare(ctx);
  EXPECT_LE(
      relative_error(model.logits(batch.ids_T, ctx), golden(file, "logits")),
      kActivationBound);
  auto [loss, tape] = record([&] { return model.loss(batch, ctx); });
  const double wanted = golden_values(golden(file, "loss_fp64"))[0];
  EXPECT_NEAR(golden_values(loss.total)[0], wanted, kLossBound * wanted);
  ParameterGradients grads;
  tape.backward(loss.total, grads);
  EXPECT_EQ(expect_gradients(model.named_tensors(), grads, file, "grad.",
                             "grad.", kGradientBound),
            GetParam().gradients);
}

TEST_P(Gqa, EveryTensorOfTheFileIsInTheModel) {
  GqaLm model = load_model();
  std::vector<std::string> names;
  for (const NamedTensor& t : sorted_by_name(model.named_tensors())) {
    names.push_back(t.name);
  }
  EXPECT_EQ(names, open_golden(folder() + "model.safetensors").names());
}

}  // namespace
}  // namespace tapeline
