// Training as a whole: against transformers, for any number of threads, and
// what the tiny preset promises about itself.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "dist/snapshot.h"
#include "gtest/gtest.h"
#include "runtime/access.h"
#include "runtime/device.h"
#include "runtime/json.h"
#include "runtime/safetensors.h"
#include "runtime/status.h"
#include "tools/config/config.h"
#include "tools/data/batches.h"
#include "tools/data/corpus.h"
#include "tools/train/host_tensors.h"
#include "tools/train/load_model.h"
#include "tools/train/run_options.h"
#include "tools/train/trainer.h"

namespace tapeline {
namespace {

template <class T>
T must(absl::StatusOr<T> value) {
  CHECK(value.ok()) << value.status().message();
  return *std::move(value);
}

double relative_error(const Tensor& a, const Tensor& b) {
  const std::vector<float> x = a.to_vector<float>(), y = b.to_vector<float>();
  CHECK_EQ(x.size(), y.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    difference += (double{x[i]} - y[i]) * (double{x[i]} - y[i]);
    norm += double{y[i]} * y[i];
  }
  return std::sqrt(difference / norm);
}

// Five steps of AdamW on one batch, as transformers and torch made them.
TEST(Training, FiveStepsOfAdamWMatchTransformers) {
  const std::string folder = "tests/data/glm/fp32";
  ModelChoices choices;
  choices.mtp_depths = 0;
  const std::unique_ptr<LanguageModel> model =
      must(load_language_model(folder, choices));
  const SafetensorsReader main =
      must(SafetensorsReader::open(folder + "/main.safetensors"));
  const auto ints = [&](const char* name) {
    return must(main.read_tensor(name)).to_vector<int32_t>();
  };
  const HostBatch batch = {ints("input_ids"), ints("labels_shifted"),
                           ints("cu_seqlens")};
  const Json meta = must(read_json(folder + "/meta.json"));
  const Json& golden = *meta.find("adamw");
  TrainerOptions options;
  options.optimizer.adamw = {
      .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
  options.learning_rate.lr = golden.find("lr")->number();
  Trainer trainer(*model, options, [&](int64_t, int64_t) { return batch; });
  for (const Json& wanted : golden.find("curve")->array()) {
    const StepRecord got = trainer.step(/*hash=*/false);
    SCOPED_TRACE(got.step);
    EXPECT_NEAR(got.loss, wanted.find("loss")->number(), 2e-5);
    EXPECT_NEAR(got.grad_norm, wanted.find("grad_norm")->number(), 2e-4);
  }
  const SafetensorsReader after =
      must(SafetensorsReader::open(folder + "/adamw_after.safetensors"));
  int compared = 0;
  for (const NamedTensor& t : trainer.tensors()) {
    if (after.find("after." + t.name) == nullptr) continue;
    EXPECT_LE(
        relative_error(t.value(), must(after.read_tensor("after." + t.name))),
        1e-4)
        << t.name;
    ++compared;
  }
  EXPECT_EQ(compared, static_cast<int>(after.names().size()));
}

// The tiny preset as `bazel run //:train` starts it.
class Tiny : public testing::Test {
 protected:
  static Config config(const std::vector<std::string>& sets = {}) {
    return must(load_config("configs/tiny.toml", sets));
  }
  struct Made {
    Config config;
    Corpus corpus;
    std::unique_ptr<TrainBatches> batches;
    std::unique_ptr<LanguageModel> model;
    std::unique_ptr<Trainer> trainer;
  };
  static std::unique_ptr<Made> make(Config c) {
    auto made = std::make_unique<Made>();
    CHECK_OK(check_settings(c));
    made->config = std::move(c);
    const Config& settings = made->config;
    made->corpus = must(load_corpus(settings.data.train));
    made->batches = std::make_unique<TrainBatches>(must(TrainBatches::create(
        made->corpus, settings.train.seq_len, settings.train.micro_batches,
        static_cast<uint64_t>(settings.seed))));
    made->model = must(make_language_model(must(model_config(settings, "")),
                                           model_choices(settings)));
    initialize(made->model->named_tensors(), DType::kF32,
               static_cast<uint64_t>(settings.seed),
               made->model->initializer_std());
    made->model->apply_training_choices();
    const TrainBatches* batches = made->batches.get();
    TrainerOptions options = trainer_options(settings);
    options.recompute =
        recomputed_layers(settings, made->model->layers()).value();
    made->trainer = std::make_unique<Trainer>(
        *made->model, std::move(options), [batches](int64_t step, int64_t m) {
          MicroBatch b = batches->get(step, m);
          return HostBatch{std::move(b.ids), std::move(b.labels),
                           std::move(b.cu_seqlens)};
        });
    return made;
  }
};

TEST_F(Tiny, ThreadsNeverChangeABit) {
  std::vector<std::string> hashes;
  for (int threads : {1, 2, 3, 7}) {
    SCOPED_TRACE(threads);
    Device device(threads);
    DeviceScope scope(device);
    std::string seen;
    {
      const auto made = make(config({"train.micro_batches=1"}));
      for (int step = 0; step < 3; ++step) {
        const StepRecord r = made->trainer->step(/*hash=*/true);
        seen += r.grad_hash + r.param_hash + " " + json_number(r.loss) + " " +
                json_number(r.grad_norm) + "\n";
      }
    }
    hashes.push_back(seen);
    // The sides of this comparison differ: others than the caller worked.
    EXPECT_EQ(device.threads().chunks_run_by_workers() > 0, threads > 1);
  }
  EXPECT_GT(hashes[0].size(), 3u * 66);
  for (const std::string& other : hashes) EXPECT_EQ(other, hashes[0]);
}

// Recomputing layers in backward, or waiting elsewhere for it, changes nothing
// but where memory goes.
TEST_F(Tiny, RecomputationAndOffloadChangeNoBit) {
  struct Policy {
    std::vector<std::string> sets;
    int layers;        // recomputed, of six and one prediction layer
    int windows = 0;   // of activations that are copied, of six
    bool ids = false;  // one selection is: that of layer 2, behind layer 3
  };
  constexpr int64_t kTokens = 48;
  std::vector<StepRecord> want;
  for (const Policy& policy : std::vector<Policy>{
           {{"recompute.policy=none"}, 0},
           {{"recompute.policy=full"}, 7},
           {{"recompute.policy=every_n", "recompute.every=2"}, 3},
           {{"recompute.policy=ratio", "recompute.ratio=0.6"}, 4},
           {{"offload.activations=true"}, 0, 5},
           {{"offload.ids=true", "recompute.policy=full"}, 7, 0, true},
           {{"offload.activations=true", "offload.ids=true",
             "recompute.policy=keep",
             "recompute.keep=[\"linear\", \"sparse_attention\"]"},
            7,
            5,
            true},
           {{"offload.activations=true", "offload.ids=true",
             "recompute.policy=every_n", "recompute.every=3",
             "recompute.drop_norms=true"},
            2,
            5,
            true}}) {
    std::vector<std::string> sets = policy.sets;
    for (const char* set :
         {"train.seq_len=48", "train.micro_batches=2", "offload.strict=true",
          "loss.z_coefficient=0.001", "loss.balance_coefficient=0.01",
          "loss.router_bias_rate=0.01"}) {
      sets.push_back(set);
    }
    SCOPED_TRACE(testing::PrintToString(policy.sets));
    const auto made = make(config(sets));
    for (size_t step = 0; step < 3; ++step) {
      const StepRecord got = made->trainer->step(/*hash=*/true);
      EXPECT_EQ(got.replays, 2 * policy.layers);
      EXPECT_EQ(
          got.offload_bytes,
          2 * kTokens * (policy.windows * 128 * 4 + (policy.ids ? 64 * 4 : 0)));
      EXPECT_EQ(made->trainer->offload_status(), absl::OkStatus());
      if (want.size() <= step) {
        want.push_back(got);
        continue;
      }
      EXPECT_EQ(got.loss, want[step].loss);
      EXPECT_EQ(got.mtp_loss, want[step].mtp_loss);
      EXPECT_EQ(got.balance_loss, want[step].balance_loss);
      EXPECT_EQ(got.z_loss, want[step].z_loss);
      EXPECT_EQ(got.indexer_loss, want[step].indexer_loss);
      EXPECT_EQ(got.grad_norm, want[step].grad_norm);
      EXPECT_EQ(got.grad_hash, want[step].grad_hash);
      EXPECT_EQ(got.param_hash, want[step].param_hash);
    }
  }
  EXPECT_FALSE(want[0].grad_hash.empty());
}

// Which copies are worth it is decided from whole passes, once: at the end of
// the warm-up, of which a resumed run has its own.
TEST_F(Tiny, OffloadIsChosenOnceFromWholePasses) {
  // Copies that never hide: loads take longer than the forward pass.
  struct SlowLoads {
    SlowLoads() {
      Device::current().pool().set_hook([](MemoryEvent event, const Block&) {
        if (event != MemoryEvent::kLoad) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      });
    }
    ~SlowLoads() { Device::current().pool().set_hook(nullptr); }
  };
  const Config c = config({"train.seq_len=48", "train.micro_batches=2",
                           "offload.activations=true", "offload.strict=true",
                           "offload.warmup_steps=2"});
  constexpr int64_t kAll = 2 * 6;  // windows of a step
  const SlowLoads slow;
  const auto made = make(c);
  const auto windows_of_a_step = [](Trainer& trainer) {
    const int64_t before = trainer.offload_counters().windows;
    trainer.step(/*hash=*/false);
    EXPECT_EQ(trainer.offload_status(), absl::OkStatus());
    return trainer.offload_counters().windows - before;
  };
  EXPECT_EQ(windows_of_a_step(*made->trainer), kAll);
  EXPECT_EQ(windows_of_a_step(*made->trainer), kAll);
  const int64_t chosen = windows_of_a_step(*made->trainer);
  EXPECT_LT(chosen, kAll);
  EXPECT_EQ(windows_of_a_step(*made->trainer), chosen);

  HostTensors host;
  std::vector<std::string> notes;
  const std::string saved =
      must(save_snapshot({testing::TempDir() + "/warm_up", 2},
                         made->trainer->contents(host), &notes));
  const auto resumed = make(c);
  CHECK_OK(resumed->trainer->restore(must(load_snapshot(saved)), &notes));
  EXPECT_EQ(windows_of_a_step(*resumed->trainer), kAll);
  EXPECT_EQ(windows_of_a_step(*resumed->trainer), kAll);
  EXPECT_LT(windows_of_a_step(*resumed->trainer), kAll);
}

TEST_F(Tiny, ResolvedConfigIsTheModelItDescribes) {
  const Config c = config();
  const Json model = must(model_config(c, ""));
  EXPECT_GE(c.train.seq_len, 256);
  EXPECT_LT(model.find("index_topk")->integer(), c.train.seq_len);
  EXPECT_EQ(model.find("index_topk")->integer(), 64);
  EXPECT_EQ(model.find("num_hidden_layers")->integer(), 6);
  EXPECT_EQ(model.find("hidden_size")->integer(), 128);
  EXPECT_EQ(model.find("vocab_size")->integer(), 256);
  EXPECT_EQ(model.find("n_routed_experts")->integer(), 8);
  EXPECT_EQ(model.find("num_experts_per_tok")->integer(), 2);
  EXPECT_EQ(model.find("n_shared_experts")->integer(), 1);
  EXPECT_EQ(model.find("num_nextn_predict_layers")->integer(), 1);
  std::string types;
  for (const Json& type : model.find("indexer_types")->array()) {
    types += type.string() == "full" ? "F" : "S";
  }
  EXPECT_EQ(types, "FFFSFS");
  std::string mlp;
  for (const Json& type : model.find("mlp_layer_types")->array()) {
    mlp += type.string()[0];
  }
  EXPECT_EQ(mlp, "ddssss");
  EXPECT_GT(c.loss.indexer_coefficient, 0);
  EXPECT_GT(c.loss.router_bias_rate, 0);
  EXPECT_GT(c.loss.balance_coefficient, 0);
}

// Rows that must leave valid keys out: more tokens before them, in their own
// document, than the selection holds.
TEST_F(Tiny, TheSelectionLeavesKeysOut) {
  const auto made = make(config());
  const MicroBatch batch = made->batches->get(1, 0);
  int64_t selective = 0;
  for (int32_t position : batch.positions) selective += position >= 64;
  EXPECT_GT(selective, batch.tokens() / 4);
}

TEST_F(Tiny, EveryPartIsTrained) {
  const auto made = make(config());
  Trainer& trainer = *made->trainer;
  trainer.step(/*hash=*/false);
  // MoE layers 2 to 5 and the prediction layer 6.
  EXPECT_EQ(trainer.expert_counts().size(), 5u);
  const int64_t per_layer =
      made->config.train.seq_len * made->config.train.micro_batches * 2;
  for (const auto& [layer, counts] : trainer.expert_counts()) {
    ASSERT_EQ(counts.size(), 8u);
    EXPECT_GE(std::count_if(counts.begin(), counts.end(),
                            [](int64_t c) { return c > 0; }),
              6)
        << "layer " << layer;
    int64_t sum = 0;
    for (int64_t count : counts) sum += count;
    EXPECT_EQ(sum, per_layer) << "layer " << layer;
  }
  std::set<std::string> kinds;
  for (const OptimizedTensor& t : trainer.optimizer().tensors()) {
    const std::vector<float> gradient =
        trainer.optimizer().gradient(trainer.gradients(), t).to_vector<float>();
    EXPECT_TRUE(std::any_of(gradient.begin(), gradient.end(),
                            [](float g) { return g != 0; }))
        << "no gradient reached " << t.name;
    kinds.insert(t.name.find(".indexer.") != std::string::npos ? "indexer"
                 : t.name.starts_with("model.layers.6.")       ? "mtp"
                                                               : "main");
  }
  EXPECT_EQ(kinds.size(), 3u);
  // All but the router biases.
  int64_t parameters = 0;
  for (const NamedTensor& t : trainer.tensors()) {
    parameters += t.parameter != nullptr;
  }
  EXPECT_EQ(parameters,
            static_cast<int64_t>(trainer.optimizer().tensors().size()));
}

TEST_F(Tiny, RouterBiasesFollowTheCountsOfAllMicroBatches) {
  const auto made = make(config());
  made->trainer->step(/*hash=*/false);
  const double rate = made->config.loss.router_bias_rate;
  for (const auto& [layer, counts] : made->trainer->expert_counts()) {
    const std::vector<float> bias =
        made->model->router_bias(layer)->value().to_vector<float>();
    int64_t sum = 0;
    for (int64_t c : counts) sum += c;
    for (size_t e = 0; e < counts.size(); ++e) {
      const int64_t below_mean = sum - 8 * counts[e];
      const double sign = below_mean > 0 ? 1 : below_mean < 0 ? -1 : 0;
      EXPECT_FLOAT_EQ(bias[e], static_cast<float>(rate * sign))
          << "layer " << layer << " expert " << e;
    }
  }
}

// Two micro-batches of one window are one of two sequences, up to rounding:
// nothing divides by their number.
TEST_F(Tiny, MicroBatchesAddUp) {
  double loss[2], norm[2];
  for (int parts : {1, 2}) {
    auto made = make(config({"train.micro_batches=1"}));
    const MicroBatch a = made->batches->get(1, 0), b = made->batches->get(2, 0);
    const auto append = [](std::vector<int32_t> x,
                           const std::vector<int32_t>& y, int32_t shift) {
      for (size_t i = shift != 0; i < y.size(); ++i) x.push_back(y[i] + shift);
      return x;
    };
    TrainerOptions options = trainer_options(made->config);
    // Their balance differs: a mean over the tokens of a micro-batch.
    options.loss.balance = 0;
    options.micro_batches = parts;
    Trainer trainer(
        *made->model, options, [&](int64_t, int64_t m) -> HostBatch {
          if (parts == 2) {
            const MicroBatch& one = m == 0 ? a : b;
            return {one.ids, one.labels, one.cu_seqlens};
          }
          return {append(a.ids, b.ids, 0), append(a.labels, b.labels, 0),
                  append(a.cu_seqlens, b.cu_seqlens,
                         static_cast<int32_t>(a.tokens()))};
        });
    const StepRecord r = trainer.step(/*hash=*/false);
    loss[parts - 1] = r.loss;
    norm[parts - 1] = r.grad_norm;
  }
  EXPECT_NEAR(loss[0], loss[1], 1e-5);
  EXPECT_NEAR(norm[0], norm[1], 1e-4 * norm[1]);
}

// A micro-batch given twice is the step it makes alone: auxiliary losses weigh
// by their share of the step's tokens, all others by counts over the whole
// step.
TEST_F(Tiny, TheSameMicroBatchTwiceIsTheSameStep) {
  StepRecord records[2];
  for (int parts : {1, 2}) {
    auto made = make(config({"loss.z_coefficient=1e-3"}));
    TrainerOptions options = trainer_options(made->config);
    options.micro_batches = parts;
    Trainer trainer(*made->model, options, [&](int64_t, int64_t) -> HostBatch {
      const MicroBatch b = made->batches->get(1, 0);
      return {b.ids, b.labels, b.cu_seqlens};
    });
    records[parts - 1] = trainer.step(/*hash=*/false);
  }
  for (const auto field :
       {&StepRecord::lm_loss, &StepRecord::mtp_loss, &StepRecord::balance_loss,
        &StepRecord::z_loss, &StepRecord::indexer_loss, &StepRecord::loss,
        &StepRecord::grad_norm}) {
    EXPECT_GT(records[0].*field, 0);
    EXPECT_NEAR(records[0].*field, records[1].*field, 2e-5 * records[0].*field);
  }
}

TEST_F(Tiny, ANotFiniteStepChangesNothing) {
  const auto made = make(config({"train.micro_batches=1"}));
  Trainer& trainer = *made->trainer;
  const StepRecord good = trainer.step(/*hash=*/true);
  // One infinite weight, put back after the step.
  const NamedTensor& t = trainer.tensors().back();
  const std::vector<float> before = t.value().to_vector<float>();
  std::vector<float> broken = before;
  broken[0] = INFINITY;
  t.value().assign(broken);
  const StepRecord bad = trainer.step(/*hash=*/false);
  EXPECT_TRUE(trainer.last_skipped());
  EXPECT_EQ(bad.skipped, 1);
  t.value().assign(before);
  // The same weights as after the first step: its fingerprint.
  TrainerOptions frozen = trainer_options(made->config);
  frozen.learning_rate.lr = 0;
  frozen.learning_rate.kind = LearningRate::Kind::kConstant;
  frozen.learning_rate.warmup_steps = 0;
  frozen.loss.router_bias_rate = 0;
  Trainer same(*made->model, frozen, [&](int64_t s, int64_t m) {
    MicroBatch b = made->batches->get(s, m);
    return HostBatch{b.ids, b.labels, b.cu_seqlens};
  });
  EXPECT_EQ(same.step(/*hash=*/true).param_hash, good.param_hash);
}

}  // namespace
}  // namespace tapeline
