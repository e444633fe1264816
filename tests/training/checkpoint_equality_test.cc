// Recomputation changes no bit: random models of the latent-attention family,
// several micro-batches in flight.
//
// TAPELINE_TEST_SEED=N repeats a run; the seed is printed.
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "autograd/checkpoint.h"
#include "autograd/tape.h"
#include "gtest/gtest.h"
#include "models/batch.h"
#include "models/glm_moe_dsa.h"
#include "models/mla_lm.h"
#include "runtime/json.h"

namespace tapeline {
namespace {

constexpr int kConfigurations = 8;

struct Drawn {
  Json json;
  int mtp_depths = 0;
  bool train_indexer = false, absorbed = true;
  std::vector<bool> recompute;
  int micro_batches = 1;
};

class Draw {
 public:
  explicit Draw(uint32_t seed) : random_(seed) {}
  int64_t operator()(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }
  bool coin() { return (*this)(0, 1) == 1; }

 private:
  std::mt19937 random_;
};

// `features` counts what was drawn: a test that never draws one shows nothing.
Drawn draw(Draw& d, int number, std::map<std::string, int>& features) {
  Drawn out;
  const auto layers = d(2, 4);
  out.json = Json::Object{};
  Json& j = out.json;
  j["model_type"] = "glm_moe_dsa";
  j["vocab_size"] = 40;
  j["hidden_size"] = 16;
  j["num_hidden_layers"] = layers;
  j["intermediate_size"] = 24;
  j["moe_intermediate_size"] = 12;
  j["num_attention_heads"] = 2;
  j["q_lora_rank"] = 12;
  j["kv_lora_rank"] = 10;
  j["qk_nope_head_dim"] = 6;
  j["qk_rope_head_dim"] = 4;
  j["v_head_dim"] = 6;
  j["index_topk"] = d(2, 6);
  j["index_n_heads"] = 2;
  j["index_head_dim"] = 8;
  j["n_routed_experts"] = 4;
  j["num_experts_per_tok"] = d(1, 3);
  Json::Array types;
  bool shared = false;
  for (int64_t i = 0; i < layers; ++i) {
    const bool full = i == 0 || d.coin();
    types.emplace_back(full ? "full" : "shared");
    shared |= !full;
  }
  j["indexer_types"] = std::move(types);
  features["a layer that shares its selection"] += shared;
  const auto dense = d(0, 2);
  j["first_k_dense_replace"] = dense;
  ++features["dense prefix " + std::to_string(dense)];
  const bool tied = d.coin();
  j["tie_word_embeddings"] = tied;
  features["tied head"] += tied;
  // Each of 0 to 3 at least once in eight.
  out.mtp_depths = number % 4;
  j["num_nextn_predict_layers"] = out.mtp_depths > 0 ? 1 : 0;
  const bool share = number % 8 < 4;
  j["index_share_for_mtp_iteration"] = share;
  if (out.mtp_depths > 1) {
    ++features[share ? "depths share a selection" : "depths select anew"];
  }
  ++features["MTP depths " + std::to_string(out.mtp_depths)];
  out.train_indexer = d.coin();
  features["trained indexer"] += out.train_indexer;
  out.absorbed = d.coin();
  features[out.absorbed ? "absorbed" : "plain"] += 1;
  const auto total = layers + (out.mtp_depths > 0 ? 1 : 0);
  out.recompute.assign(static_cast<size_t>(total), false);
  out.recompute[static_cast<size_t>(d(0, total - 1))] = true;
  for (int64_t i = 0; i < total; ++i) {
    if (d.coin()) out.recompute[static_cast<size_t>(i)] = true;
  }
  out.micro_batches = 1 + number % 4;
  features["micro-batches in flight"] += out.micro_batches > 1;
  return out;
}

HostBatch draw_batch(Draw& d) {
  HostBatch batch;
  batch.cu_seqlens = {0};
  for (int64_t s = d(1, 3); s > 0; --s) {
    const auto length = d(1, 12);
    for (int64_t t = 0; t < length; ++t) {
      batch.ids.push_back(static_cast<int32_t>(d(0, 39)));
      batch.labels.push_back(t + 1 < length && d(0, 4) > 0
                                 ? static_cast<int32_t>(d(0, 39))
                                 : -100);
    }
    batch.cu_seqlens.push_back(static_cast<int32_t>(batch.ids.size()));
  }
  return batch;
}

enum class Order { kOneByOne, kForwardsFirst, kReversed };

// Everything a step makes, by name.
struct Result {
  std::map<std::string, std::vector<float>> values;
  int64_t replays = 0, stash_reads = 0;
};

Result run(const Drawn& drawn, const std::vector<HostBatch>& batches,
           Order order, bool recompute) {
  absl::StatusOr<MlaLmConfig> config = parse_glm_moe_dsa(drawn.json);
  CHECK(config.ok()) << config.status().message();
  config->mtp_depths = drawn.mtp_depths;
  config->absorbed = drawn.absorbed;
  if (drawn.train_indexer) {
    config->indexer_training = IndexerTraining::kSelectedKeys;
  }
  MlaLm model{std::make_shared<const MlaLmConfig>(*std::move(config))};
  const std::vector<NamedTensor> tensors = model.named_tensors();
  initialize(tensors, DType::kF32, /*seed=*/7, /*normal_std=*/0.3);
  model.apply_training_choices();

  const Denominators n = count_targets(batches, drawn.mtp_depths);
  const CheckpointCounters before = checkpoint_counters();
  struct MicroBatch {
    Context ctx;
    LanguageModelLoss loss;
    Tape tape;
  };
  std::vector<std::unique_ptr<MicroBatch>> flight;
  ParameterGradients grads;
  Result out;
  const auto forward = [&](const HostBatch& host) {
    MicroBatch& mb = *flight.emplace_back(std::make_unique<MicroBatch>());
    mb.ctx.sequence = Sequence::packed(host.cu_seqlens);
    mb.ctx.weights = {.balance = 0.01, .z = 0.001, .indexer = 0.1};
    if (recompute) mb.ctx.recompute = drawn.recompute;
    model.prepare(mb.ctx);
    const Batch batch = make_batch(host, n, 0.3, DType::kF32);
    mb.loss = record(mb.tape, [&] { return model.loss(batch, mb.ctx); });
  };
  const auto backward = [&](size_t i) {
    MicroBatch& mb = *flight[i];
    mb.tape.backward(mb.loss.total, grads);
    const std::string at = "micro-batch " + std::to_string(i) + " ";
    out.values[at + "loss"] = mb.loss.total.to_vector<float>();
    for (const auto& [layer, log] : mb.ctx.statistics) {
      const std::string of = at + "layer " + std::to_string(layer) + " ";
      const auto add = [&](const char* name, const std::vector<Tensor>& v) {
        for (const Tensor& x : v) {
          out.values[of + name].push_back(x.to_vector<float>()[0]);
        }
      };
      add("balance", log.balance_loss);
      add("z", log.z_loss);
      add("indexer", log.indexer_loss);
      for (const Tensor& counts_E : log.expert_counts_E) {
        for (const int64_t c : counts_E.to_vector<int64_t>()) {
          out.values[of + "counts"].push_back(static_cast<float>(c));
        }
      }
    }
  };
  for (size_t i = 0; i < batches.size(); ++i) {
    forward(batches[i]);
    if (order == Order::kOneByOne) backward(i);
  }
  for (size_t i = 0; i < batches.size(); ++i) {
    if (order == Order::kForwardsFirst) backward(i);
    if (order == Order::kReversed) backward(batches.size() - 1 - i);
  }
  for (const NamedTensor& t : tensors) {
    if (t.parameter == nullptr || !grads.reached(*t.parameter)) continue;
    out.values["gradient " + t.name] =
        t.block(grads.combined(*t.parameter)).to_vector<float>();
  }
  out.replays = checkpoint_counters().replays - before.replays;
  out.stash_reads = checkpoint_counters().stash_reads - before.stash_reads;
  return out;
}

// Replays and values read from stashes: every replay of a layer takes its own
// selection, if it makes one, and its router's bias and choice from there.
struct Planned {
  int64_t replays = 0, reads = 0;
};
Planned plan(const Drawn& drawn) {
  Planned out;
  const Json& j = drawn.json;
  const auto layers = j.find("num_hidden_layers")->integer();
  const auto dense = j.find("first_k_dense_replace")->integer();
  const bool shared = j.find("index_share_for_mtp_iteration")->boolean();
  const Json::Array& types = j.find("indexer_types")->array();
  for (size_t i = 0; i < drawn.recompute.size(); ++i) {
    if (!drawn.recompute[i]) continue;
    if (static_cast<int64_t>(i) < layers) {
      ++out.replays;
      out.reads += (types[i].string() == "full" ? 1 : 0) +
                   (static_cast<int64_t>(i) >= dense ? 2 : 0);
      continue;
    }
    // The prediction layer runs once per depth.
    out.replays += drawn.mtp_depths;
    out.reads += 2 * drawn.mtp_depths + (shared ? 1 : drawn.mtp_depths);
  }
  out.replays *= drawn.micro_batches;
  out.reads *= drawn.micro_batches;
  return out;
}

void expect_same(const Result& got, const Result& want) {
  for (const auto& [name, values] : want.values) {
    const auto found = got.values.find(name);
    ASSERT_NE(found, got.values.end()) << name;
    EXPECT_TRUE(found->second == values) << name;
  }
  EXPECT_EQ(got.values.size(), want.values.size());
}

TEST(Equality, RecomputedRandomModelsKeepEveryBit) {
  const char* given = std::getenv("TAPELINE_TEST_SEED");
  const uint32_t seed =
      given != nullptr ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10))
                       : std::random_device()();
  std::cout << "TAPELINE_TEST_SEED=" << seed << std::endl;
  Draw d(seed);
  std::map<std::string, int> features;
  int64_t stash_reads = 0;
  for (int number = 0; number < kConfigurations; ++number) {
    const Drawn drawn = draw(d, number, features);
    SCOPED_TRACE(drawn.json.dump());
    std::vector<HostBatch> batches;
    for (int m = 0; m < drawn.micro_batches; ++m) {
      batches.push_back(draw_batch(d));
    }
    const auto [planned, planned_reads] = plan(drawn);
    const Result one = run(drawn, batches, Order::kOneByOne, false);
    EXPECT_EQ(one.replays, 0);
    EXPECT_EQ(one.stash_reads, 0);
    EXPECT_GT(one.values.size(), 20u);
    expect_same(run(drawn, batches, Order::kForwardsFirst, false), one);
    const Result again = run(drawn, batches, Order::kForwardsFirst, true);
    EXPECT_EQ(again.replays, planned);
    expect_same(again, one);
    const Result reversed = run(drawn, batches, Order::kReversed, false);
    const Result reversed_again = run(drawn, batches, Order::kReversed, true);
    EXPECT_EQ(reversed_again.replays, planned);
    EXPECT_EQ(reversed_again.stash_reads, planned_reads);
    stash_reads += reversed_again.stash_reads;
    expect_same(reversed_again, reversed);
  }
  EXPECT_GT(stash_reads, 0);
  for (const char* feature :
       {"a layer that shares its selection", "depths share a selection",
        "depths select anew", "MTP depths 0", "MTP depths 1", "MTP depths 2",
        "MTP depths 3", "micro-batches in flight"}) {
    EXPECT_GT(features[feature], 0) << feature << " was never drawn";
  }
}

// Between the passes of a pipeline other micro-batches may end a step.
TEST(Bug, B23_ABiasUpdateBetweenThePassesChangesNoRouting) {
  Draw d(11);
  std::map<std::string, int> features;
  Drawn drawn = draw(d, 4, features);
  drawn.json["first_k_dense_replace"] = 0;
  drawn.recompute.assign(drawn.recompute.size(), true);
  const HostBatch host = draw_batch(d);
  Result results[2];
  for (const bool recompute : {false, true}) {
    MlaLm model{std::make_shared<const MlaLmConfig>(
        parse_glm_moe_dsa(drawn.json).value())};
    const std::vector<NamedTensor> tensors = model.named_tensors();
    initialize(tensors, DType::kF32, /*seed=*/7, /*normal_std=*/0.3);
    model.apply_training_choices();
    Context ctx;
    ctx.sequence = Sequence::packed(host.cu_seqlens);
    if (recompute) ctx.recompute = drawn.recompute;
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
