#include "tests/training/random_models.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>

#include "autograd/dropped_outputs.h"
#include "autograd/ops.h"
#include "autograd/tape.h"
#include "gtest/gtest.h"
#include "models/glm_moe_dsa.h"
#include "runtime/tree.h"

namespace tapeline {

void Draw::shuffle(std::vector<int>& values) {
  std::shuffle(values.begin(), values.end(), random_);
}

uint32_t test_seed() {
  const char* given = std::getenv("TAPELINE_TEST_SEED");
  const uint32_t seed =
      given != nullptr ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10))
                       : std::random_device()();
  std::cout << "TAPELINE_TEST_SEED=" << seed << std::endl;
  return seed;
}

MlaLmConfig RandomModel::config() const {
  absl::StatusOr<MlaLmConfig> config = parse_glm_moe_dsa(json);
  CHECK(config.ok()) << config.status().message();
  config->mtp_depths = mtp_depths;
  config->absorbed = absorbed;
  if (train_indexer) config->indexer_training = IndexerTraining::kSelectedKeys;
  return *std::move(config);
}

ModelDeck::ModelDeck(Draw& draw, Features& features)
    : draw_(draw), features_(features) {}

int ModelDeck::dealt(const std::string& feature, std::vector<int> values) {
  std::vector<int>& deck = decks_[feature];
  if (deck.empty()) {
    deck = std::move(values);
    draw_.shuffle(deck);
  }
  const int value = deck.back();
  deck.pop_back();
  return value;
}

RandomModel ModelDeck::next() {
  RandomModel out;
  out.json = Json::Object{};
  Json& j = out.json;
  j["model_type"] = "glm_moe_dsa";
  j["vocab_size"] = 40;
  j["hidden_size"] = 16;
  j["intermediate_size"] = 24;
  j["moe_intermediate_size"] = 12;
  j["num_attention_heads"] = 2;
  j["q_lora_rank"] = 12;
  j["kv_lora_rank"] = 10;
  j["qk_nope_head_dim"] = 6;
  j["qk_rope_head_dim"] = 4;
  j["v_head_dim"] = 6;
  j["index_topk"] = draw_(2, 6);
  j["index_n_heads"] = 2;
  j["index_head_dim"] = 8;
  j["n_routed_experts"] = 4;
  j["num_experts_per_tok"] = draw_(1, 3);
  // Two of eight have two groups that share, so that a selection moves even
  // where no activation does.
  std::string types = "FSFS";
  if (dealt("groups", {0, 0, 1, 1, 1, 1, 1, 1}) == 1) {
    types.resize(static_cast<size_t>(draw_(2, 4)));
    for (char& type : types) type = draw_.coin() ? 'F' : 'S';
    types[0] = 'F';
  } else {
    ++features_["two groups of layers that share"];
  }
  features_["a layer that shares its selection"] +=
      types.find('S') != std::string::npos;
  j["num_hidden_layers"] = static_cast<int64_t>(types.size());
  Json::Array indexers;
  for (const char type : types) {
    indexers.emplace_back(type == 'F' ? "full" : "shared");
  }
  j["indexer_types"] = std::move(indexers);
  const int dense = dealt("dense", {0, 1, 2, 0, 1, 2, 0, 1});
  j["first_k_dense_replace"] = dense;
  ++features_["dense prefix " + std::to_string(dense)];
  const bool tied = dealt("tied", {0, 0, 0, 1, 1, 1, 1, 0}) == 1;
  j["tie_word_embeddings"] = tied;
  ++features_[tied ? "tied head" : "head of its own"];
  out.mtp_depths = dealt("depths", {0, 1, 2, 3, 0, 1, 2, 3});
  ++features_["MTP depths " + std::to_string(out.mtp_depths)];
  j["num_nextn_predict_layers"] = out.mtp_depths > 0 ? 1 : 0;
  bool share = draw_.coin();
  if (out.mtp_depths > 1) {
    share = dealt("share", {0, 1, 0, 1}) == 1;
    ++features_[share ? "depths share a selection" : "depths select anew"];
  }
  j["index_share_for_mtp_iteration"] = share;
  out.train_indexer = dealt("indexer", {0, 0, 0, 0, 1, 1, 1, 1}) == 1;
  ++features_[out.train_indexer ? "trained indexer" : "frozen indexer"];
  out.absorbed = dealt("absorbed", {0, 0, 0, 1, 1, 1, 1, 1}) == 1;
  ++features_[out.absorbed ? "absorbed" : "plain"];
  out.micro_batches = dealt("micro-batches", {1, 2, 3, 4, 1, 2, 3, 4});
  ++features_["micro-batches " + std::to_string(out.micro_batches)];
  return out;
}

MemoryChoices draw_choices(Draw& draw, const RandomModel& model, Moves moves,
                           bool nested, Features& features) {
  MemoryChoices out;
  const int64_t total = model.total_layers();
  out.recompute.assign(static_cast<size_t>(total), false);
  out.recompute[static_cast<size_t>(draw(0, total - 1))] = true;
  for (int64_t i = 0; i < total; ++i) {
    if (draw.coin()) out.recompute[static_cast<size_t>(i)] = true;
  }
  if (draw.coin()) {
    for (const std::string& op : keepable_ops()) {
      if (draw.coin()) out.keep.push_back(op);
    }
  }
  features["kept ops"] += !out.keep.empty();
  out.drop_norms = draw.coin();
  features["dropped norms"] += out.drop_norms;
  out.nested = nested;
  features["nested"] += nested;
  out.offload.activations = moves != Moves::kNothing && moves != Moves::kIds;
  out.offload.ids = moves != Moves::kNothing && moves != Moves::kActivations;
  if (moves == Moves::kSomeLayers) {
    // At least two, so that something moves.
    std::vector<int> layers;
    for (int i = 0; i < model.layers(); ++i) layers.push_back(i);
    draw.shuffle(layers);
    out.offload.layers.assign(layers.size(), false);
    for (size_t i = 0; i < layers.size(); ++i) {
      if (i < 2 || draw.coin()) {
        out.offload.layers[static_cast<size_t>(layers[i])] = true;
      }
    }
  }
  constexpr const char* kNames[] = {"nothing", "activations", "ids", "both",
                                    "both of some layers"};
  ++features[std::string("moves ") + kNames[static_cast<int>(moves)]];
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

namespace {

// One micro-batch between its passes. The graph outlives the tape.
struct InFlight {
  Batch batch;
  Context ctx;
  std::unique_ptr<OffloadGraph> offload;
  std::function<Tensor(const Tensor&)> whole;  // the loss as a checkpoint
  Tensor total;
  Tape tape;
};

std::vector<std::string> recorded_ops(const Tape& tape) {
  std::stringstream text;
  tape.print(text);
  std::vector<std::string> ops;
  for (std::string line; std::getline(text, line);) {
    std::istringstream fields(line);
    std::string number, op, path;
    fields >> number >> op >> path;
    ops.push_back(path + " " + op);
  }
  return ops;
}

void add_statistics(const Context& ctx, const std::string& at,
                    StepResult& out) {
  for (const auto& [layer, log] : ctx.statistics) {
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
}

}  // namespace

StepResult run_step(const RandomModel& drawn,
                    const std::vector<HostBatch>& batches, Order order,
                    const MemoryChoices& choices) {
  MlaLm model{std::make_shared<const MlaLmConfig>(drawn.config())};
  const std::vector<NamedTensor> tensors = model.named_tensors();
  initialize(tensors, DType::kF32, /*seed=*/7, /*normal_std=*/0.3);
  model.apply_training_choices();

  const Denominators n = count_targets(batches, drawn.mtp_depths);
  const CheckpointCounters before = checkpoint_counters();
  const int64_t refills_before = refills();
  const int64_t reloads = Storage::demand_reloads();
  std::vector<std::unique_ptr<InFlight>> flight;
  ParameterGradients grads;
  StepResult out;
  const auto forward = [&](const HostBatch& host) {
    InFlight& mb = *flight.emplace_back(std::make_unique<InFlight>());
    mb.ctx.sequence = Sequence::packed(host.cu_seqlens);
    mb.ctx.weights = {.balance = 0.01, .z = 0.001, .indexer = 0.1};
    mb.ctx.recompute = choices.recompute;
    mb.ctx.keep = choices.keep;
    mb.ctx.drop_norms = choices.drop_norms;
    mb.offload = std::make_unique<OffloadGraph>(
        plan_windows(model.layer_calls(static_cast<int64_t>(host.ids.size())),
                     choices.offload),
        /*strict=*/true);
    mb.ctx.offload = mb.offload.get();
    model.prepare(mb.ctx);
    mb.batch = make_batch(host, n, 0.3, DType::kF32);
    mb.whole = [&](const Tensor&) {
      return model.loss(mb.batch, mb.ctx).total;
    };
    mb.total = record(mb.tape, [&] {
      return checkpoint(choices.nested, mb.whole, mb.batch.ids_T);
    });
    const std::vector<std::string> ops = recorded_ops(mb.tape);
    out.ops.insert(out.ops.end(), ops.begin(), ops.end());
  };
  const auto backward = [&](size_t i) {
    InFlight& mb = *flight[i];
    mb.tape.backward(mb.total, grads);
    const std::string at = "micro-batch " + std::to_string(i) + " ";
    out.values[at + "loss"] = mb.total.to_vector<float>();
    add_statistics(mb.ctx, at, out);
    EXPECT_EQ(mb.offload->status(), absl::OkStatus());
    EXPECT_EQ(mb.offload->counters().late, 0);
    out.moved += mb.offload->counters();
    out.planned_bytes += planned_bytes(mb.offload->plan());
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
  const CheckpointCounters after = checkpoint_counters();
  out.counters = {after.replays - before.replays,
                  after.stash_reads - before.stash_reads,
                  after.kept_ops - before.kept_ops};
  out.refills = refills() - refills_before;
  out.demand_reloads = Storage::demand_reloads() - reloads;
  return out;
}

PlannedWork planned_work(const RandomModel& model, const MemoryChoices& choices,
                         const std::vector<std::string>& plain_ops) {
  const Json& j = model.json;
  const auto layers = model.layers();
  const auto dense = j.find("first_k_dense_replace")->integer();
  const bool shared = j.find("index_share_for_mtp_iteration")->boolean();
  const Json::Array& types = j.find("indexer_types")->array();
  PlannedWork out;
  // Of one micro-batch. A replay of everything replays the rest inside it.
  const int inside = choices.nested ? 2 : 1;
  if (choices.nested) ++out.replays;
  for (int64_t i = 0; i < model.total_layers(); ++i) {
    const bool recomputed = choices.recompute[static_cast<size_t>(i)];
    const bool mtp = i >= layers;
    const int64_t calls = mtp ? model.mtp_depths : 1;
    const int64_t selections =
        mtp ? (shared ? 1 : calls)
            : (types[static_cast<size_t>(i)].string() == "full" ? 1 : 0);
    // Its own selection; its router's bias and choice.
    const int64_t reads = selections + (mtp || i >= dense ? 2 * calls : 0);
    if (recomputed) out.replays += calls;
    out.stash_reads += (recomputed ? reads : 0) + (choices.nested ? reads : 0);
    if (choices.drop_norms && !choices.nested && !recomputed) {
      out.refills += 2 * calls;
    }
    // Attention that an indexer learns from without the absorbed form is made
    // for it alone: nothing records it.
    const bool aside = recomputed && model.train_indexer && !model.absorbed &&
                       std::count(choices.keep.begin(), choices.keep.end(),
                                  "sparse_attention") > 0;
    if (aside) out.kept_ops += inside * selections;
  }
  out.replays *= model.micro_batches;
  out.stash_reads *= model.micro_batches;
  out.refills *= model.micro_batches;
  out.kept_ops *= model.micro_batches;
  for (const std::string& line : plain_ops) {
    const size_t space = line.find(' ');
    const std::string op = line.substr(space + 1);
    int layer = -1;
    if (line.starts_with("layers.")) layer = std::atoi(line.c_str() + 7);
    if (line.starts_with("mtp.")) layer = static_cast<int>(layers);
    if (layer >= 0 && choices.recompute[static_cast<size_t>(layer)] &&
        std::count(choices.keep.begin(), choices.keep.end(), op) > 0) {
      out.kept_ops += inside;
    }
  }
  return out;
}

void expect_same(const StepResult& got, const StepResult& want) {
  for (const auto& [name, values] : want.values) {
    const auto found = got.values.find(name);
    ASSERT_NE(found, got.values.end()) << name;
    EXPECT_TRUE(found->second == values) << name;
  }
  EXPECT_EQ(got.values.size(), want.values.size());
}

}  // namespace tapeline
