// glm_moe_dsa against values that transformers 5.17 computed (and, for MTP and
// the indexer loss, a reference that agrees with it on everything it has).
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "autograd/tape.h"
#include "gtest/gtest.h"
#include "models/batch.h"
#include "models/context.h"
#include "models/glm_moe_dsa.h"
#include "models/mla_lm.h"
#include "models/weights.h"
#include "tests/golden/golden.h"

namespace tapeline {
namespace {

const std::string kFolder = "tests/data/glm/fp32/";
SafetensorsReader open(const std::string& file) {
  return open_golden(kFolder + file);
}

struct Choices {
  int mtp_depths = 0;
  bool mtp_after_norm = false, absorbed = true;
  IndexerTraining indexer = IndexerTraining::kFrozen;
};

struct Loaded {
  MlaLm model;
  std::vector<NamedTensor> tensors;
};

Loaded load_model(const Choices& choices) {
  absl::StatusOr<MlaLmConfig> config =
      parse_glm_moe_dsa(golden_config(kFolder));
  CHECK(config.ok()) << config.status().message();
  config->mtp_depths = choices.mtp_depths;
  config->mtp_after_norm = choices.mtp_after_norm;
  config->indexer_training = choices.indexer;
  config->absorbed = choices.absorbed;
  Loaded loaded{MlaLm{std::make_shared<const MlaLmConfig>(*std::move(config))},
                {}};
  loaded.tensors = loaded.model.named_tensors();
  CHECK_OK(load(loaded.tensors, DType::kF32, open("model.safetensors")));
  loaded.model.apply_training_choices();
  return loaded;
}

Context context(const MlaLm& model, const HostBatch& batch) {
  Context ctx;
  ctx.sequence = Sequence::packed(batch.cu_seqlens);
  model.prepare(ctx);
  return ctx;
}

class Form : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Attention, Form, testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "Absorbed" : "Plain";
                         });

TEST_P(Form, LogitsLossAndGradientsAreThoseOfTransformers) {
  Loaded loaded = load_model({.absorbed = GetParam()});
  const SafetensorsReader file = open("main.safetensors");
  const HostBatch host = golden_batch(file);
  const Batch batch =
      make_batch(host, count_targets({host}, 0), 0.1, DType::kF32);
  {
    Context ctx = context(loaded.model, host);
    EXPECT_LE(relative_error(loaded.model.logits(batch.ids_T, ctx),
                             golden(file, "logits")),
              kActivationBound);
  }
  Context ctx = context(loaded.model, host);
  auto [loss, tape] = record([&] { return loaded.model.loss(batch, ctx); });
  const double wanted = golden_values(golden(file, "loss_fp64"))[0];
  EXPECT_NEAR(golden_values(loss.total)[0], wanted, kLossBound * wanted);
  ParameterGradients grads;
  tape.backward(loss.total, grads);
  EXPECT_GT(expect_gradients(loaded.tensors, grads, file, "grad.", "grad.",
                             kGradientBound),
            100);
}

class MtpFrom : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Hidden, MtpFrom, testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "AfterNorm" : "BeforeNorm";
                         });

TEST_P(MtpFrom, TwoDepthsThroughOneLayerMatch) {
  Loaded loaded = load_model({.mtp_depths = 2, .mtp_after_norm = GetParam()});
  const SafetensorsReader file =
      open(GetParam() ? "mtp_post.safetensors" : "mtp_pre.safetensors");
  const HostBatch host = golden_batch(file);
  const Batch batch =
      make_batch(host, count_targets({host}, 2), 0.1, DType::kF32);
  for (int d = 0; d < 2; ++d) {
    const std::string depth = "." + std::to_string(d);
    EXPECT_EQ(batch.mtp[d].ids_T.to_vector<int32_t>(),
              golden(file, "mtp_tokens" + depth).to_vector<int32_t>());
    EXPECT_EQ(batch.mtp[d].label_T.to_vector<int32_t>(),
              golden(file, "mtp_labels" + depth).to_vector<int32_t>());
  }
  Context ctx = context(loaded.model, host);
  auto [loss, tape] = record([&] { return loaded.model.loss(batch, ctx); });
  ASSERT_EQ(loss.mtp.size(), 2u);
  const std::vector<double> wanted = golden_values(golden(file, "mtp_losses"));
  for (int d = 0; d < 2; ++d) {
    EXPECT_NEAR(golden_values(loss.mtp[d])[0], 0.05 * wanted[d],
                kActivationBound * wanted[d]);
  }
  ParameterGradients grads;
  tape.backward(loss.total, grads);
  EXPECT_GT(expect_gradients(loaded.tensors, grads, file, "grad.", "grad.",
                             kGradientBound),
            100);
}

// The KL loss of each layer's own indexer, towards the attention over the
// selected keys or over all of them.
class IndexerStage : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Stage, IndexerStage, testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "Dense" : "Sparse";
                         });

TEST_P(IndexerStage, LossAndGradientsMatch) {
  const bool dense = GetParam();
  const std::string stage = dense ? "dense." : "sparse.";
  const SafetensorsReader file = open("indexer_kl.safetensors");
  const HostBatch host = golden_batch(file);
  const auto tokens = static_cast<double>(host.ids.size());
  Loaded loaded =
      load_model({.indexer = dense ? IndexerTraining::kAllKeys
                                   : IndexerTraining::kSelectedKeys});
  const Batch batch =
      make_batch(host, count_targets({host}, 0), 0.1, DType::kF32);
  Context ctx = context(loaded.model, host);
  ctx.weights.indexer = 1 / tokens;
  auto [loss, tape] = record([&] { return loaded.model.loss(batch, ctx); });
  int layers = 0;
  for (const auto& [layer, log] : ctx.statistics) {
    if (log.indexer_loss.empty()) continue;
    const std::string key = stage + "loss." + std::to_string(layer);
    EXPECT_LE(relative_error(log.indexer_loss[0], golden(file, key)),
              kIndexerBound)
        << key;
    ++layers;
  }
  EXPECT_EQ(layers, 4);
  ParameterGradients grads;
  tape.backward(loss.total, grads);
  EXPECT_EQ(expect_gradients(loaded.tensors, grads, file, stage + "grad.",
                             stage + "grad.", kIndexerBound),
            20);
}

TEST(Indexer, FrozenGetsNoGradient) {
  Loaded loaded = load_model({});
  const HostBatch host = golden_batch(open("main.safetensors"));
  const Batch batch =
      make_batch(host, count_targets({host}, 0), 0.1, DType::kF32);
  Context ctx = context(loaded.model, host);
  ctx.weights.indexer = 1;
  auto [loss, tape] = record([&] { return loaded.model.loss(batch, ctx); });
  ParameterGradients grads;
  tape.backward(loss.total, grads);
  int indexer = 0;
  for (auto& [path, parameter] : parameters(loaded.model)) {
    if (path.find(".indexer.") == std::string::npos) continue;
    EXPECT_FALSE(grads.reached(*parameter)) << path;
    ++indexer;
  }
  EXPECT_GT(indexer, 0);
}

TEST(Router, AuxiliaryLossesAndGradientsMatch) {
  const SafetensorsReader file = open("router_aux.safetensors");
  for (int layer = 2; layer < 6; ++layer) {
    const std::string at = "." + std::to_string(layer);
    const Tensor ids = golden(file, "router_ids" + at);
    const Tensor bias = golden(file, "bias_before" + at);
    const auto check = [&](const std::string& name, auto make_loss) {
      Tape tape;
      const Tensor logits = tape.input(golden(file, "router_logits" + at));
      const Tensor loss = record(tape, [&] { return make_loss(logits); });
      EXPECT_LE(relative_error(loss, golden(file, name + at)), 2e-6) << name;
      ParameterGradients grads;
      EXPECT_LE(relative_error(tape.backward(loss, grads)[0],
                               golden(file, name + ".grad_logits" + at)),
                kGradientBound)
          << name;
    };
    check("bal_unbiased", [&](const Tensor& l) {
      return balance_loss(l, {}, ids, {}, {BalanceRule::Kind::kSigmoid});
    });
    check("bal_biased", [&](const Tensor& l) {
      return balance_loss(l, bias, ids, {},
                          {BalanceRule::Kind::kSigmoidBiased});
    });
    check("zloss", [&](const Tensor& l) { return z_loss(l, {}); });
    std::vector<int64_t> counts;
    for (int32_t c : golden(file, "counts" + at).to_vector<int32_t>()) {
      counts.push_back(c);
    }
    EXPECT_EQ(count_experts(ids, {}, 8).to_vector<int64_t>(), counts);
  }
}

// One token at a time through the cache gives the logits of the whole prompt.
TEST(Cache, DecodingMatchesTheWholePrompt) {
  Loaded loaded = load_model({});
  const std::vector<int32_t> all =
      golden(open("main.safetensors"), "input_ids").to_vector<int32_t>();
  const std::vector<int32_t> ids(all.begin(), all.begin() + 20);
  Context whole;
  whole.sequence = Sequence::packed({0, 20});
  loaded.model.prepare(whole);
  const Tensor wanted = loaded.model.logits(Tensor::from(ids, {20}), whole);
  KvCache cache;
  for (int t = 0; t < 20; ++t) {
    Context ctx;
    ctx.cache = &cache;
    ctx.sequence = Sequence::appended(t, 1);
    loaded.model.prepare(ctx);
    const Tensor got =
        loaded.model.logits(Tensor::from<int32_t>({ids[t]}, {1}), ctx);
    EXPECT_LE(relative_error(got, wanted.slice(0, t, t + 1)), kActivationBound)
        << "token " << t;
  }
}

TEST(Names, EveryTensorOfTheFileIsInTheModel) {
  Loaded loaded = load_model({});
  std::vector<std::string> names;
  for (const NamedTensor& t : sorted_by_name(loaded.tensors)) {
    names.push_back(t.name);
  }
  EXPECT_EQ(names, open("model.safetensors").names());
}

}  // namespace
}  // namespace tapeline
