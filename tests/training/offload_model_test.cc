// Selections under checkpoint and offload: contracts that need layers, on a
// small model and on the layers of the tiny preset. Names are those of
// docs/checkpoint_and_offload.md.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "autograd/checkpoint.h"
#include "autograd/observer.h"
#include "autograd/offload_test_ops.h"
#include "autograd/ops.h"
#include "autograd/tape.h"
#include "gtest/gtest.h"
#include "models/batch.h"
#include "models/glm_moe_dsa.h"
#include "models/mla_lm.h"
#include "tests/training/random_models.h"
#include "tools/config/config.h"
#include "tools/train/run_options.h"

namespace tapeline {
namespace {

// What each layer selected or was given, run by run.
class Selections : public Observer {
 public:
  struct Seen {
    uint64_t storage;
    Phase phase;
    bool requires_grad;
    std::vector<int32_t> ids;  // of first runs
  };
  void value(const char* name, const std::string& path,
             const Tensor& x) override {
    if (std::string(name) != "selected_ids") return;
    EXPECT_EQ(x.dtype(), DType::kI32);
    EXPECT_TRUE(x.contiguous());
    used[path].push_back(
        {x.storage()->id(), phase(), x.requires_grad, x.to_vector<int32_t>()});
  }
  void gradient(const char*, const std::string&, const Tensor&) override {}
  Tensor choice(const char* name, const std::string& path,
                const Tensor& ids) override {
    if (std::string(name) == "index_ids") ++made[path];
    return ids;
  }

  std::map<std::string, std::vector<Seen>> used;  // by layer
  std::map<std::string, int> made;                // calls of each indexer
};

std::string layer_path_of(int layer) {
  return "layers." + std::to_string(layer) + ".self_attn";
}

struct Options {
  bool recompute = false, offload = false, train_indexer = false;
  bool share_across_mtp = true;
  int mtp_depths = 2;
};

// A micro-batch between its passes. The graph outlives the tape.
struct Pass {
  Batch batch;
  Context ctx;
  std::unique_ptr<OffloadGraph> graph;
  LanguageModelLoss loss;
  Tape tape;
};

// F S F S and tiny's F F F S F S, with prediction layers behind.
class OffloadModel : public testing::TestWithParam<const char*> {
 protected:
  bool tiny() const { return std::string(GetParam()) == "tiny"; }

  MlaLm make(const Options& options) const {
    Json json;
    if (tiny()) {
      const absl::StatusOr<Config> settings =
          load_config("configs/tiny.toml", {});
      CHECK(settings.ok()) << settings.status().message();
      json = model_config(*settings, "").value();
    } else {
      Draw d(1);
      Features features;
      json = ModelDeck(d, features).next().json;
      json["num_hidden_layers"] = 4;
      Json::Array types;
      for (const char* type : {"full", "shared", "full", "shared"}) {
        types.emplace_back(type);
      }
      json["indexer_types"] = std::move(types);
      json["index_topk"] = 4;
    }
    json["num_nextn_predict_layers"] = 1;
    json["index_share_for_mtp_iteration"] = options.share_across_mtp;
    MlaLmConfig config = parse_glm_moe_dsa(json).value();
    config.mtp_depths = options.mtp_depths;
    if (options.train_indexer) {
      config.indexer_training = IndexerTraining::kSelectedKeys;
    }
    MlaLm model{std::make_shared<const MlaLmConfig>(std::move(config))};
    initialize(model.named_tensors(), DType::kF32, /*seed=*/7,
               /*normal_std=*/tiny() ? 0.05 : 0.3);
    model.apply_training_choices();
    return model;
  }

  // Three sequences; the first has more keys than are selected.
  HostBatch host(const MlaLm& model, int seed = 0) const {
    const int32_t first = model.c->index_top_k + 16;
    HostBatch batch;
    batch.cu_seqlens = {0, first, first + 7, first + 8};
    for (int32_t t = 0; t < first + 8; ++t) {
      batch.ids.push_back((t * t + 3 * t + seed) % 40);
      batch.labels.push_back((t + seed) % 40);
    }
    for (size_t s = 1; s < batch.cu_seqlens.size(); ++s) {
      batch.labels[static_cast<size_t>(batch.cu_seqlens[s]) - 1] = -100;
    }
    return batch;
  }

  std::unique_ptr<Pass> forward(const MlaLm& model, const HostBatch& host,
                                const Options& options) const {
    auto pass = std::make_unique<Pass>();
    pass->ctx.sequence = Sequence::packed(host.cu_seqlens);
    pass->ctx.weights.indexer = 0.1;
    pass->ctx.recompute.assign(static_cast<size_t>(model.c->total_layers()),
                               options.recompute);
    if (options.offload) {
      pass->graph = std::make_unique<OffloadGraph>(
          plan_windows(model.layer_calls(static_cast<int64_t>(host.ids.size())),
                       {true, true, {}}),
          /*strict=*/true);
      pass->ctx.offload = pass->graph.get();
    }
    model.prepare(pass->ctx);
    pass->batch = make_batch(host, count_targets({host}, options.mtp_depths),
                             0.3, DType::kF32);
    pass->loss =
        record(pass->tape, [&] { return model.loss(pass->batch, pass->ctx); });
    return pass;
  }
  static void backward(Pass& pass, ParameterGradients& grads) {
    pass.tape.backward(pass.loss.total, grads);
    if (pass.graph) {
      EXPECT_EQ(pass.graph->status(), absl::OkStatus());
    }
  }
  static std::map<std::string, std::vector<float>> gradients(
      MlaLm& model, ParameterGradients& grads) {
    std::map<std::string, std::vector<float>> out;
    for (const NamedTensor& t : model.named_tensors()) {
      if (t.parameter == nullptr || !grads.reached(*t.parameter)) continue;
      out[t.name] = t.block(grads.combined(*t.parameter)).to_vector<float>();
    }
    return out;
  }

  test_ops::CopyDevice device_;
};

INSTANTIATE_TEST_SUITE_P(Contract, OffloadModel,
                         testing::Values("small", "tiny"),
                         [](const auto& of) { return std::string(of.param); });

TEST_P(OffloadModel, C19_OneSelectionPerSourceMicroBatchAndDepth) {
  for (const bool share : {true, false}) {
    for (const bool less_memory : {false, true}) {
      SCOPED_TRACE(testing::Message() << share << less_memory);
      const Options options = {.recompute = less_memory,
                               .offload = less_memory,
                               .train_indexer = share,
                               .share_across_mtp = share};
      const MlaLm model = make(options);
      Selections seen;
      const ObserverScope scope(seen);
      ParameterGradients grads;
      std::vector<std::unique_ptr<Pass>> passes;
      for (int m = 0; m < 2; ++m) {
        passes.push_back(forward(model, host(model, m), options));
      }
      for (const auto& pass : passes) backward(*pass, grads);
      int main = 0, mtp = 0;
      for (const auto& [path, calls] : seen.made) {
        EXPECT_EQ(calls, 2) << path;
        (path.starts_with("mtp.") ? mtp : main) += calls;
      }
      EXPECT_EQ(main, 2 * (tiny() ? 4 : 2));
      EXPECT_EQ(mtp, 2 * (share ? 1 : 2));  // C32
    }
  }
}

// A frozen indexer has no part in a replay: its weights may change meanwhile.
TEST_P(OffloadModel, C20_AFrozenIndexerIsNotProjectedAgain) {
  std::map<std::string, std::vector<float>> want;
  for (const bool recompute : {false, true}) {
    const Options options = {.recompute = recompute};
    MlaLm model = make(options);
    const auto pass = forward(model, host(model), options);
    for (auto& [path, parameter] : parameters(model)) {
      if (path.find(".indexer.") == std::string::npos) continue;
      parameter->value().set_zero();
    }
    ParameterGradients grads;
    backward(*pass, grads);
    if (!recompute) want = gradients(model, grads);
    EXPECT_TRUE(gradients(model, grads) == want);
  }
  EXPECT_GT(want.size(), 20u);
}

TEST_P(OffloadModel, C20_ATrainedIndexerIs) {
  std::map<std::string, std::vector<float>> got[2];
  for (const bool less_memory : {false, true}) {
    const Options options = {.recompute = less_memory,
                             .offload = less_memory,
                             .train_indexer = true};
    MlaLm model = make(options);
    ParameterGradients grads;
    backward(*forward(model, host(model), options), grads);
    got[less_memory] = gradients(model, grads);
  }
  EXPECT_TRUE(got[1] == got[0]);
  int learned = 0;
  for (const auto& [name, gradient] : got[0]) {
    learned += name.find(".indexer.") != std::string::npos &&
               std::any_of(gradient.begin(), gradient.end(),
                           [](float g) { return g != 0; });
  }
  EXPECT_GT(learned, 8);
}

// One storage from the source through all layers that share it, through
// checkpoints, offload and reload; C31: never with a gradient.
TEST_P(OffloadModel, C28_ASelectionIsOneStorageAllTheWay) {
  for (const bool recompute : {false, true}) {
    const Options options = {.recompute = recompute, .offload = true};
    const MlaLm model = make(options);
    Selections seen;
    const ObserverScope scope(seen);
    const auto pass = forward(model, host(model), options);
    ParameterGradients grads;
    backward(*pass, grads);
    const std::vector<int> sources = selection_sources(model.c->full_index);
    std::set<uint64_t> storages;
    for (int i = 0; i < static_cast<int>(model.c->layers); ++i) {
      SCOPED_TRACE(i);
      const auto& source =
          seen.used.at(layer_path_of(sources[static_cast<size_t>(i)]));
      const auto& used = seen.used.at(layer_path_of(i));
      ASSERT_EQ(used.size(), recompute ? 2u : 1u);
      for (const Selections::Seen& run : used) {
        EXPECT_EQ(run.storage, source[0].storage);
        EXPECT_EQ(run.ids, source[0].ids);
        EXPECT_FALSE(run.requires_grad);
      }
      EXPECT_EQ(used.back().phase,
                recompute ? Phase::kReplay : Phase::kOriginal);
      storages.insert(used[0].storage);
    }
    EXPECT_EQ(storages.size(), tiny() ? 4u : 2u);
    // Selections are part of what moved.
    const int64_t ids_bytes = pass->batch.tokens * model.c->index_top_k * 4;
    const int64_t hidden_bytes = pass->batch.tokens * model.c->dim * 4;
    const int64_t copied = model.c->layers - 1;
    EXPECT_EQ(pass->graph->counters().copied_bytes,
              copied * hidden_bytes + ids_bytes);
    EXPECT_EQ(pass->graph->counters().prefetched, copied);
    EXPECT_EQ(pass->graph->counters().late, 0);
  }
}

TEST_P(OffloadModel, C29_RowsSelectInsideTheirSequenceAndArePadded) {
  const Options options = {};
  const MlaLm model = make(options);
  Selections seen;
  const ObserverScope scope(seen);
  const auto pass = forward(model, host(model), options);
  const std::vector<int32_t> begin =
      pass->ctx.sequence.begin_T.to_vector<int32_t>();
  const std::vector<int32_t> end =
      pass->ctx.sequence.end_T.to_vector<int32_t>();
  const auto top_k = static_cast<size_t>(model.c->index_top_k);
  int padded = 0, selective = 0;
  for (const auto& [path, runs] : seen.used) {
    const std::vector<int32_t>& ids = runs[0].ids;
    ASSERT_EQ(ids.size(), begin.size() * top_k);
    for (size_t t = 0; t < begin.size(); ++t) {
      const auto keys = static_cast<size_t>(end[t] - begin[t]);
      selective += keys > top_k;
      for (size_t k = 0; k < top_k; ++k) {
        const int32_t id = ids[t * top_k + k];
        if (k >= std::min(keys, top_k)) {
          EXPECT_EQ(id, -1);
          ++padded;
          continue;
        }
        EXPECT_GE(id, begin[t]);
        EXPECT_LT(id, end[t]) << path << " row " << t;
        EXPECT_GT(id, k > 0 ? ids[t * top_k + k - 1] : -1);
      }
    }
  }
  EXPECT_GT(padded, 0);
  EXPECT_GT(selective, 0);
}

// Prediction layers select for themselves, in no window.
TEST_P(OffloadModel, C32_PredictionLayersNeverUseTheMainStacksSelection) {
  for (const bool share : {true, false}) {
    const Options options = {.offload = true, .share_across_mtp = share};
    const MlaLm model = make(options);
    Selections seen;
    const ObserverScope scope(seen);
    const auto pass = forward(model, host(model), options);
    const uint64_t main =
        seen.used.at(layer_path_of(static_cast<int>(model.c->layers) - 1))[0]
            .storage;
    const uint64_t first = seen.used.at("mtp.0.self_attn")[0].storage;
    const uint64_t second = seen.used.at("mtp.1.self_attn")[0].storage;
    EXPECT_NE(first, main);
    EXPECT_NE(second, main);
    EXPECT_EQ(first == second, share);
    ASSERT_EQ(pass->graph->plan().size(), static_cast<size_t>(model.c->layers));
    EXPECT_EQ(pass->graph->counters().windows, model.c->layers);
    ParameterGradients grads;
    backward(*pass, grads);
  }
}

TEST_P(OffloadModel, C33_MicroBatchesHaveTheirOwnSelections) {
  const Options options = {.recompute = true, .offload = true};
  const MlaLm model = make(options);
  Selections seen;
  const ObserverScope scope(seen);
  const auto a = forward(model, host(model, 0), options);
  const auto b = forward(model, host(model, 1), options);
  ParameterGradients grads;
  backward(*a, grads);
  backward(*b, grads);
  for (const auto& [path, runs] : seen.used) {
    if (path.starts_with("mtp.")) continue;
    ASSERT_EQ(runs.size(), 4u);
    EXPECT_NE(runs[0].storage, runs[1].storage);
    // Replayed in the order of their backwards.
    EXPECT_EQ(runs[2].storage, runs[0].storage) << path;
    EXPECT_EQ(runs[3].storage, runs[1].storage) << path;
  }
}

using OffloadModelDeathTest = OffloadModel;
INSTANTIATE_TEST_SUITE_P(Contract, OffloadModelDeathTest,
                         testing::Values("small", "tiny"),
                         [](const auto& of) { return std::string(of.param); });

TEST_P(OffloadModelDeathTest, C27_ASharerWantsASelectionOfInt32Rows) {
  const Options options = {};
  const MlaLm model = make(options);
  const HostBatch batch = host(model);
  Context ctx;
  ctx.sequence = Sequence::packed(batch.cu_seqlens);
  model.prepare(ctx);
  const auto tokens = static_cast<int64_t>(batch.ids.size());
  const DecoderLayer& layer = model.layers.items[tiny() ? 3 : 1];
  const Tensor h_TD = Tensor::zeros({tokens, model.c->dim}, DType::kF32);
  const auto with = [&](const Tensor& ids) {
    LayerState in{h_TD, std::nullopt};
    if (ids) {
      in.selected = DsaSelection{ids, std::make_shared<InvertedSelection>()};
    }
    return layer(in, ctx);
  };
  const int64_t k = model.c->index_top_k;
  EXPECT_EQ(with(Tensor::zeros({tokens, k}, DType::kI32)).hidden_TD.size(0),
            tokens);
  EXPECT_DEATH(with(Tensor()), "layer " + std::to_string(layer.layer) +
                                   " shares an index selection, but none was "
                                   "given");
  EXPECT_DEATH(with(Tensor::zeros({tokens, k}, DType::kI64)), "wanted i32");
  EXPECT_DEATH(with(Tensor::zeros({k, tokens}, DType::kI32).transpose(0, 1)),
               "last strides must be 1");
}

// Sequence parallelism on simulated ranks: queries are split, keys are not,
// and ids are positions among all keys.
TEST(Contract, C34_ShardsOfQueriesAreTheWhole) {
  constexpr int64_t kTokens = 24, kHeads = 3, kDim = 8, kIndexDim = 4;
  constexpr int kTopK = 5;
  constexpr int64_t kValueDim = 6;
  const auto noise = [](const Shape& shape, int seed) {
    std::vector<float> v(static_cast<size_t>(shape.elements()));
    for (size_t i = 0; i < v.size(); ++i) {
      v[i] = std::sin(static_cast<float>(seed) +
                      1.3f * static_cast<float>(i * i % 101));
    }
    return Tensor::from(v, shape);
  };
  const Tensor q = noise({kTokens, kHeads, kDim}, 1),
               kv = noise({kTokens, kDim}, 2);
  const Tensor iq = noise({kTokens, kHeads, kIndexDim}, 3);
  const Tensor ik = noise({kTokens, kIndexDim}, 4),
               iw = noise({kTokens, kHeads}, 5);
  const Tensor dy = noise({kTokens, kHeads, kValueDim}, 6);
  const Sequence whole = Sequence::packed({0, 15, 24});
  struct Part {
    std::vector<int32_t> ids;
    std::vector<float> o, dq, dkv;
  };
  const auto run = [&](int64_t begin, int64_t end) {
    const auto rows = [&](const Tensor& x) {
      return x.slice(0, begin, end).clone();
    };
    const Sequence local{rows(whole.begin_T), rows(whole.end_T),
                         rows(whole.position_T)};
    const DsaSelection selected =
        select_keys(rows(iq), ik, rows(iw), local, 0.5, kTopK);
    Tape tape;
    const Tensor q_ = tape.input(rows(q)), kv_ = tape.input(kv);
    const SparseAttention a = record(tape, [&] {
      return sparse_attention(q_, kv_, selected, 0.3, kValueDim);
    });
    ParameterGradients grads;
    const std::vector<Tensor> d = tape.backward({{a.o_THV, rows(dy)}}, grads);
    return Part{selected.ids_TK.to_vector<int32_t>(),
                a.o_THV.to_vector<float>(), d[0].to_vector<float>(),
                d[1].to_vector<float>()};
  };
  const Part want = run(0, kTokens);
  const Part first = run(0, kTokens / 2), second = run(kTokens / 2, kTokens);
  const auto joined = [](auto a, const auto& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  };
  EXPECT_EQ(joined(first.ids, second.ids), want.ids);
  EXPECT_GE(*std::max_element(second.ids.begin(), second.ids.end()),
            kTokens / 2);
  EXPECT_LT(second.ids[0], static_cast<int32_t>(kTokens / 2))
      << "a row of the second shard looks into the first";
  EXPECT_EQ(joined(first.o, second.o), want.o);
  EXPECT_EQ(joined(first.dq, second.dq), want.dq);
  // Each key's gradient is the sum of both shards', in another order.
  double difference = 0, norm = 0, dot = 0, sum_norm = 0;
  for (size_t i = 0; i < want.dkv.size(); ++i) {
    const double sum = double{first.dkv[i]} + second.dkv[i];
    difference += (sum - want.dkv[i]) * (sum - want.dkv[i]);
    norm += double{want.dkv[i]} * want.dkv[i];
    sum_norm += sum * sum;
    dot += sum * want.dkv[i];
  }
  EXPECT_LT(std::sqrt(difference / norm), 1e-6);
  EXPECT_GT(dot / std::sqrt(norm * sum_norm), 0.9999);
}

}  // namespace
}  // namespace tapeline
