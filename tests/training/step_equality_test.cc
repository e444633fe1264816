// Whole steps in less memory: after five of them every tensor is the same.
//
// TAPELINE_TEST_SEED=N repeats a run; the seed is printed.
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "autograd/offload_test_ops.h"
#include "gtest/gtest.h"
#include "models/batch.h"
#include "tests/training/random_models.h"
#include "tools/train/language_model.h"
#include "tools/train/trainer.h"

namespace tapeline {
namespace {

constexpr int kModels = 8, kSteps = 5;

// Five steps: what each reported, and all tensors after the last.
struct Trained {
  std::vector<StepRecord> records;
  std::map<std::string, std::vector<float>> tensors;
  int64_t biases = 0;  // values of router biases that are not 0
  int64_t planned_bytes = 0, loaded_bytes = 0;
};

Trained train(const RandomModel& drawn,
              const std::vector<std::vector<HostBatch>>& steps,
              const MemoryChoices& choices, bool muon) {
  ModelChoices c;
  c.mtp_depths = drawn.mtp_depths;
  c.absorbed = drawn.absorbed;
  if (drawn.train_indexer) c.indexer = IndexerTraining::kSelectedKeys;
  absl::StatusOr<std::unique_ptr<LanguageModel>> made =
      make_language_model(drawn.json, c);
  CHECK(made.ok()) << made.status().message();
  LanguageModel& model = **made;
  initialize(model.named_tensors(), DType::kF32, /*seed=*/3,
             /*normal_std=*/0.2);
  model.apply_training_choices();
  TrainerOptions options;
  options.micro_batches = drawn.micro_batches;
  options.loss = {.mtp_weight = 0.3,
                  .balance = 0.01,
                  .z = 0.001,
                  .indexer = drawn.train_indexer ? 0.5 : 0,
                  .router_bias_rate = 0.01};
  options.optimizer.kind =
      muon ? OptimizerOptions::Kind::kMuon : OptimizerOptions::Kind::kAdamW;
  options.learning_rate.lr = 0.01;
  options.recompute = choices.recompute;
  options.keep = choices.keep;
  options.drop_norms = choices.drop_norms;
  options.offload = choices.offload;
  options.strict_offload = true;
  Trainer trainer(model, options, [&](int64_t step, int64_t m) {
    return steps[static_cast<size_t>(step - 1)][static_cast<size_t>(m)];
  });
  Trained out;
  for (int step = 0; step < kSteps; ++step) {
    out.records.push_back(trainer.step(/*hash=*/true));
    EXPECT_FALSE(trainer.last_skipped());
  }
  EXPECT_EQ(trainer.offload_status(), absl::OkStatus());
  for (const NamedTensor& t : trainer.tensors()) {
    out.tensors[t.name] = t.value().to_vector<float>();
    if (t.buffer == nullptr) continue;
    for (const float bias : out.tensors[t.name]) out.biases += bias != 0;
  }
  for (const OptimizerState& s : trainer.optimizer().state()) {
    out.tensors[std::string(s.kind) + " of " + s.name] =
        s.value.to_vector<float>();
  }
  for (const auto& batches : steps) {
    for (const HostBatch& batch : batches) {
      out.planned_bytes += planned_bytes(plan_windows(
          model.layer_calls(static_cast<int64_t>(batch.ids.size())),
          choices.offload));
    }
  }
  out.loaded_bytes = trainer.offload_counters().loaded_bytes;
  return out;
}

TEST(Equality, FiveStepsInLessMemoryEndInTheSameTensors) {
  Draw d(test_seed());
  Features features;
  ModelDeck deck(d, features);
  int64_t moved = 0, replays = 0, biases = 0;
  for (int number = 0; number < kModels; ++number) {
    const RandomModel model = deck.next();
    SCOPED_TRACE(model.json.dump());
    const bool muon = number % 2 == 1;
    std::vector<std::vector<HostBatch>> steps(kSteps);
    for (auto& step : steps) {
      for (int m = 0; m < model.micro_batches; ++m) {
        HostBatch batch = draw_batch(d);
        // At least one target, so that the step has a loss.
        if (m == 0) {
          batch.ids.insert(batch.ids.end(), {1, 2, 3, 4, 5, 6});
          batch.labels.insert(batch.labels.end(), {2, 3, 4, 5, 6, 7});
          batch.cu_seqlens.push_back(static_cast<int32_t>(batch.ids.size()));
        }
        step.push_back(std::move(batch));
      }
    }
    test_ops::CopyDevice device;
    const Trained want = train(model, steps, {}, muon);
    biases += want.biases;
    for (const Moves moves : {Moves::kBoth, Moves::kSomeLayers}) {
      const MemoryChoices choices =
          draw_choices(d, model, moves, /*nested=*/false, features);
      const Trained got = train(model, steps, choices, muon);
      int64_t bytes = 0;
      for (size_t i = 0; i < want.records.size(); ++i) {
        SCOPED_TRACE(i);
        const StepRecord &a = got.records[i], &b = want.records[i];
        EXPECT_EQ(a.loss, b.loss);
        EXPECT_EQ(a.mtp_loss, b.mtp_loss);
        EXPECT_EQ(a.balance_loss, b.balance_loss);
        EXPECT_EQ(a.z_loss, b.z_loss);
        EXPECT_EQ(a.indexer_loss, b.indexer_loss);
        EXPECT_EQ(a.grad_norm, b.grad_norm);
        EXPECT_EQ(a.grad_hash, b.grad_hash);
        EXPECT_EQ(a.param_hash, b.param_hash);
        EXPECT_FALSE(a.grad_hash.empty());
        EXPECT_EQ(b.replays, 0);
        EXPECT_EQ(b.offload_bytes, 0);
        EXPECT_GT(a.replays, 0);
        replays += a.replays;
        bytes += a.offload_bytes;
      }
      EXPECT_EQ(bytes, got.planned_bytes);
      EXPECT_EQ(got.loaded_bytes, got.planned_bytes);
      moved += bytes;
      EXPECT_EQ(got.tensors.size(), want.tensors.size());
      for (const auto& [name, values] : want.tensors) {
        const auto found = got.tensors.find(name);
        ASSERT_NE(found, got.tensors.end()) << name;
        EXPECT_TRUE(found->second == values) << name;
      }
    }
  }
  EXPECT_GT(moved, 0);
  EXPECT_GT(replays, 0);
  EXPECT_GT(biases, 0) << "router biases moved";
}

}  // namespace
}  // namespace tapeline
