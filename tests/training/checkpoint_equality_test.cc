// Recomputation and offload change no bit: random models of the
// latent-attention family, several micro-batches in flight, every gradient
// compared by name.
//
// TAPELINE_TEST_SEED=N repeats a run; the seed is printed.
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "autograd/offload_test_ops.h"
#include "autograd/ops.h"
#include "autograd/tape.h"
#include "gtest/gtest.h"
#include "models/glm_moe_dsa.h"
#include "models/mla_lm.h"
#include "tests/training/random_models.h"

namespace tapeline {
namespace {

constexpr int kModels = 8;

TEST(Equality, RandomModelsInLessMemoryKeepEveryBit) {
  Draw d(test_seed());
  Features features;
  ModelDeck deck(d, features);
  for (int number = 0; number < kModels; ++number) {
    const RandomModel model = deck.next();
    SCOPED_TRACE(model.json.dump());
    std::vector<HostBatch> batches;
    for (int m = 0; m < model.micro_batches; ++m) {
      batches.push_back(draw_batch(d));
    }
    // Kernels run at once, copies when they are waited for; freed memory is
    // NaN.
    test_ops::CopyDevice device;
    std::map<Order, StepResult> plain;
    for (const Order order :
         {Order::kOneByOne, Order::kForwardsFirst, Order::kReversed}) {
      const StepResult& got = plain[order] =
          run_step(model, batches, order, {});
      EXPECT_EQ(got.counters.replays + got.counters.stash_reads +
                    got.counters.kept_ops + got.moved.copied_bytes +
                    got.refills,
                0);
      EXPECT_GT(got.values.size(), 20u);
    }
    expect_same(plain[Order::kForwardsFirst], plain[Order::kOneByOne]);
    for (const Moves moves : {Moves::kNothing, Moves::kActivations, Moves::kIds,
                              Moves::kBoth, Moves::kSomeLayers}) {
      for (const bool nested : {false, true}) {
        // Windows inside a replay do nothing, and nested everything is.
        if (nested && moves != Moves::kNothing) continue;
        const Order order = d.coin() ? Order::kReversed : Order::kForwardsFirst;
        if (model.micro_batches > 1) {
          ++features[order == Order::kReversed ? "F0 F1 B1 B0" : "F0 F1 B0 B1"];
        }
        const MemoryChoices choices =
            draw_choices(d, model, moves, nested, features);
        const StepResult got = run_step(model, batches, order, choices);
        const PlannedWork planned =
            planned_work(model, choices, plain[order].ops);
        EXPECT_EQ(got.counters.replays, planned.replays);
        EXPECT_GT(got.counters.replays, 0);
        EXPECT_EQ(got.counters.stash_reads, planned.stash_reads);
        EXPECT_EQ(got.counters.kept_ops, planned.kept_ops);
        EXPECT_EQ(got.refills, planned.refills);
        EXPECT_EQ(got.moved.copied_bytes, got.planned_bytes);
        EXPECT_EQ(got.moved.loaded_bytes, got.planned_bytes);
        EXPECT_EQ(got.demand_reloads, 0);
        EXPECT_EQ(device->pinned().stats().live, 0);
        expect_same(got, plain[order]);
        features["stash reads"] += got.counters.stash_reads > 0;
        features["ops not run again"] += got.counters.kept_ops > 0;
        features["outputs made again"] += got.refills > 0;
        features["moved activations"] +=
            moves == Moves::kActivations && got.planned_bytes > 0;
        features["moved selections"] +=
            moves == Moves::kIds && got.planned_bytes > 0;
        features["moved both"] +=
            moves == Moves::kBoth && got.planned_bytes > 0;
        features["moved some layers"] +=
            moves == Moves::kSomeLayers && got.planned_bytes > 0;
      }
    }
  }
  for (const char* feature : {"a layer that shares its selection",
                              "two groups of layers that share",
                              "depths share a selection",
                              "depths select anew",
                              "MTP depths 0",
                              "MTP depths 1",
                              "MTP depths 2",
                              "MTP depths 3",
                              "dense prefix 0",
                              "dense prefix 1",
                              "dense prefix 2",
                              "tied head",
                              "head of its own",
                              "trained indexer",
                              "frozen indexer",
                              "absorbed",
                              "plain",
                              "micro-batches 1",
                              "micro-batches 2",
                              "micro-batches 3",
                              "micro-batches 4",
                              "F0 F1 B0 B1",
                              "F0 F1 B1 B0",
                              "nested",
                              "kept ops",
                              "dropped norms",
                              "stash reads",
                              "ops not run again",
                              "outputs made again",
                              "moved activations",
                              "moved selections",
                              "moved both",
                              "moved some layers"}) {
    EXPECT_GT(features[feature], 0) << feature << " was never drawn";
  }
}

// Between the passes of a pipeline other micro-batches may end a step.
TEST(Bug, B23_ABiasUpdateBetweenThePassesChangesNoRouting) {
  Draw d(11);
  Features features;
  RandomModel drawn = ModelDeck(d, features).next();
  drawn.json["first_k_dense_replace"] = 0;
  const HostBatch host = draw_batch(d);
  StepResult results[2];
  for (const bool recompute : {false, true}) {
    MlaLm model{std::make_shared<const MlaLmConfig>(
        parse_glm_moe_dsa(drawn.json).value())};
    const std::vector<NamedTensor> tensors = model.named_tensors();
    initialize(tensors, DType::kF32, /*seed=*/7, /*normal_std=*/0.3);
    model.apply_training_choices();
    Context ctx;
    ctx.sequence = Sequence::packed(host.cu_seqlens);
    ctx.recompute.assign(static_cast<size_t>(drawn.layers()), recompute);
    ctx.weights.balance = 0.5;
    model.prepare(ctx);
    const Batch batch =
        make_batch(host, count_targets({host}, 0), 0, DType::kF32);
    auto [loss, tape] = record([&] { return model.loss(batch, ctx); });
    for (DecoderLayer& layer : model.layers.items) {
      // The experts that were taken would be taken no more.
      const Tensor bias = Tensor::from<float>({9, -9, 7, -7}, {4});
      layer.moe->router.bias->set_value(bias);
    }
    ParameterGradients grads;
    tape.backward(loss.total, grads);
    for (const NamedTensor& t : tensors) {
      if (t.parameter == nullptr || !grads.reached(*t.parameter)) continue;
      results[recompute].values[t.name] =
          t.block(grads.combined(*t.parameter)).to_vector<float>();
    }
  }
  expect_same(results[1], results[0]);
}

}  // namespace
}  // namespace tapeline
