// The plan of a run is what the run does: every part of its timeline, byte for
// byte, on tiny's own layers.
#include "tools/train/plan.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/device.h"
#include "tools/config/config.h"
#include "tools/train/memory_log.h"
#include "tools/train/run_options.h"

namespace tapeline {
namespace {

constexpr int64_t kTokens = 192;

Config tiny(const std::vector<std::string>& sets) {
  std::vector<std::string> all = {"train.seq_len=192", "train.micro_batches=2"};
  all.insert(all.end(), sets.begin(), sets.end());
  const absl::StatusOr<Config> config = load_config("configs/tiny.toml", all);
  CHECK(config.ok()) << config.status().message();
  CHECK(check_settings(*config).ok());
  return *config;
}

struct Case {
  const char* name;
  std::vector<std::string> sets;
};
const std::vector<Case>& cases() {
  static const std::vector<Case>& cases = *new std::vector<Case>{
      {"Plain", {}},
      {"Full", {"recompute.policy=full"}},
      {"EveryThird", {"recompute.policy=every_n", "recompute.every=3"}},
      {"Keep",
       {"recompute.policy=keep",
        "recompute.keep=[\"sparse_attention\", \"grouped_linear\"]"}},
      {"DropNorms", {"recompute.drop_norms=true"}},
      {"Offload", {"offload.activations=true", "offload.strict=true"}},
      {"OffloadIds", {"offload.ids=true", "offload.strict=true"}},
      {"FullAndOffload",
       {"recompute.policy=full", "offload.activations=true", "offload.ids=true",
        "offload.strict=true"}},
      // 256 KiB a window, of which the last one that is copied does not fit.
      {"OffloadBeyondTheCap",
       {"train.seq_len=512", "offload.activations=true",
        "offload.pinned_cap_mib=1"}},
  };
  return cases;
}

// Text of any kind: lengths of documents are no matter of memory.
HostBatch batch_of(int64_t tokens, int64_t step, int64_t m) {
  std::mt19937 random(static_cast<uint32_t>(7 * step + m));
  HostBatch batch;
  for (int64_t t = 0; t < tokens; ++t) {
    batch.ids.push_back(static_cast<int32_t>(random() % 256));
    batch.labels.push_back(static_cast<int32_t>(random() % 256));
  }
  batch.cu_seqlens = {0, 50, static_cast<int32_t>(tokens)};
  return batch;
}

class PlanTest : public testing::TestWithParam<Case> {};

TEST_P(PlanTest, IsWhatTheRunDoes) {
  const Config config = tiny(GetParam().sets);
  const absl::StatusOr<RunPlan> plan = plan_run(config, "");
  ASSERT_TRUE(plan.ok()) << plan.status();

  Device device(2);
  const DeviceScope scope(device);
  device.pinned().set_cap(config.offload.pinned_cap_mib << 20);
  const Json json = model_config(config, "").value();
  const std::unique_ptr<LanguageModel> model =
      make_language_model(json, model_choices(config)).value();
  initialize(model->named_tensors(), DType::kF32, 1, model->initializer_std());
  model->apply_training_choices();
  TrainerOptions options = trainer_options(config);
  options.recompute = recomputed_layers(config, model->layers()).value();
  Trainer trainer(*model, options, [&](int64_t step, int64_t m) {
    return batch_of(config.train.seq_len, step, m);
  });
  trainer.step(false);
  MemoryLog log(device);
  device.pool().reset_peak();
  const StepRecord record = trainer.step(false);
  const MemoryProfile run = log.take();
  EXPECT_TRUE(trainer.offload_status().ok()) << trainer.offload_status();

  EXPECT_EQ(plan->step.peak, device.pool().stats().peak);
  EXPECT_EQ(plan->step.by_tag, run.by_tag);
  EXPECT_EQ(plan->step.kept, run.kept);
  ASSERT_GT(run.timeline.size(), 50u);
  ASSERT_EQ(plan->step.timeline.size(), run.timeline.size());
  for (size_t i = 0; i < run.timeline.size(); ++i) {
    ASSERT_EQ(plan->step.timeline[i], run.timeline[i])
        << i << " " << run.timeline[i].pass << " " << run.timeline[i].layer;
  }
  EXPECT_EQ(plan->step.replays, record.replays);
  EXPECT_EQ(plan->step.dropped, run.dropped);
  EXPECT_EQ(plan->offload, record.offload_bytes);
  EXPECT_EQ(plan->offload<planned_bytes(plan->windows) * 2,
                          config.offload.pinned_cap_mib> 0);
  EXPECT_EQ(plan->pinned, record.pinned_bytes);
  // Size classes may be larger than what is copied.
  EXPECT_EQ(plan->step.evicted, run.evicted);
  EXPECT_EQ(plan->step.loaded, run.loaded);
  EXPECT_GE(run.evicted, record.offload_bytes);
}

INSTANTIATE_TEST_SUITE_P(Tiny, PlanTest, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

int64_t kept(const RunPlan& plan) {
  int64_t bytes = 0;
  for (const LayerMemory& layer : plan.layers) bytes += layer.kept;
  return bytes;
}

TEST(Plan, EachMeansLowersThePeakOrWhatIsKept) {
  const auto plan = [](const std::vector<std::string>& sets) {
    return plan_run(tiny(sets), "").value();
  };
  const RunPlan plain = plan({}), full = plan({"recompute.policy=full"});
  const RunPlan both = plan({"recompute.policy=full",
                             "offload.activations=true", "offload.ids=true"});
  const RunPlan keep =
      plan({"recompute.policy=keep", "recompute.keep=[\"sparse_attention\"]"});
  const RunPlan norms = plan({"recompute.drop_norms=true"});
  EXPECT_LT(kept(full), kept(plain) / 5);
  EXPECT_LT(kept(both), kept(full));
  EXPECT_GT(kept(keep), kept(full));
  EXPECT_LT(kept(keep), kept(plain));
  EXPECT_LT(kept(norms), kept(plain));
  EXPECT_LT(full.step.peak, plain.step.peak);
  EXPECT_LT(both.step.peak, full.step.peak);
  // tiny is F F F S F S: the selection of layer 2 leaves in the window of
  // layer 3, that of layer 4 would in the last window, which is not copied.
  ASSERT_EQ(both.windows.size(), 6u);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(both.windows[i].ids, i == 3 || i == 5) << i;
    EXPECT_EQ(both.windows[i].copied, i < 5) << i;
  }
  EXPECT_EQ(both.layers[3].offloaded, kTokens * (128 + 64) * 4);
  EXPECT_EQ(both.layers[5].offloaded, 0);
}

}  // namespace
}  // namespace tapeline
