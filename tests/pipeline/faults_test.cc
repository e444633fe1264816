// Faults that public pipeline engines have or had, one test each, on a real
// model: F of the engine that docs/schedules.md lists, B of its bug cases.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "autograd/checkpoint.h"
#include "dist/pipeline/generators.h"
#include "dist/pipeline/layout.h"
#include "gtest/gtest.h"
#include "models/glm_moe_dsa.h"
#include "models/mla_lm.h"
#include "tests/pipeline/pipeline_run.h"

namespace tapeline {
namespace {

struct ModelShape {
  std::string indexers = "FSFS";  // by layer: full, shared
  std::string mlp = "dsss";       // dense, sparse
  int depths = 0;
  bool tied = false, share_depths = true;
};

PipelineModel make_model(const ModelShape& shape) {
  PipelineModel out;
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
  j["index_topk"] = 3;
  j["index_n_heads"] = 2;
  j["index_head_dim"] = 8;
  j["n_routed_experts"] = 4;
  j["num_experts_per_tok"] = 2;
  j["num_hidden_layers"] = static_cast<int64_t>(shape.mlp.size());
  Json::Array indexers, mlp;
  for (const char c : shape.indexers) {
    indexers.emplace_back(c == 'F' ? "full" : "shared");
  }
  for (const char c : shape.mlp) {
    mlp.emplace_back(c == 'd' ? "dense" : "sparse");
  }
  j["indexer_types"] = std::move(indexers);
  j["mlp_layer_types"] = std::move(mlp);
  j["tie_word_embeddings"] = shape.tied;
  j["num_nextn_predict_layers"] = shape.depths > 0 ? 1 : 0;
  j["index_share_for_mtp_iteration"] = shape.share_depths;
  out.choices.mtp_depths = shape.depths;
  return out;
}

HostBatch make_batch_of(int tokens, int valid, int key) {
  HostBatch batch;
  for (int t = 0; t < tokens; ++t) {
    batch.ids.push_back((key * 11 + t * 7) % 40);
    batch.labels.push_back(t < valid ? (key * 5 + t * 3) % 40 : -100);
  }
  batch.cu_seqlens = {0, tokens};
  return batch;
}

Batches make_batches(int steps, int micro_batches) {
  Batches out(static_cast<size_t>(steps));
  for (int s = 0; s < steps; ++s) {
    for (int j = 0; j < micro_batches; ++j) {
      out[s].push_back(make_batch_of(5 + (s + 3 * j) % 6, 4, s * 10 + j));
    }
  }
  return out;
}

Layout layout_of(const std::string& text, const ModelShape& shape) {
  return parse_layout(text, "layout",
                      {.layers = static_cast<int>(shape.mlp.size()),
                       .depths = shape.depths})
      .value();
}

struct Plan {
  std::string schedule;
  int ranks, chunks;
  std::string layout;
};

PipelineResult run(const Plan& of, const ModelShape& shape,
                   const Batches& batches, const LossOptions& losses,
                   const StageMemory& memory = {}) {
  const int m = static_cast<int>(batches[0].size());
  return run_pipeline(
      make_model(shape), layout_of(of.layout, shape),
      make_schedule(of.schedule, {of.ranks, of.chunks, m}).value(), batches,
      losses, memory, {});
}

void expect_equal(const Plan& of, const ModelShape& shape,
                  const Batches& batches,
                  const LossOptions& losses = test_losses(false),
                  const StageMemory& memory = {}) {
  EXPECT_EQ(difference(run(of, shape, batches, losses, memory),
                       run_trainer(make_model(shape), batches, losses)),
            "")
      << of.schedule << " " << of.layout;
}

const std::vector<Plan>& spread() {
  static const std::vector<Plan>& runs = *new std::vector<Plan>{
      {"1f1b", 2, 1, "Ett|ttL"},          {"1f1b", 4, 1, "Et|t|t|tL"},
      {"interleaved", 2, 2, "Et|t|t|tL"}, {"zb1p", 2, 1, "Ettt|tL"},
      {"zbv", 2, 2, "Et|t|t|tL"},         {"dualpipev", 2, 2, "E|tt|t|tL"},
  };
  return runs;
}

// --- Scale

TEST(Scale, F01_B16_UnequalNumbersOfTargetsWeighAsOnOneDevice) {
  Batches batches(2);
  for (auto& step : batches) {
    step = {make_batch_of(4, 1, 1), make_batch_of(9, 7, 2),
            make_batch_of(70, 64, 3), make_batch_of(6, 0, 4)};
  }
  for (const Plan& of : spread()) expect_equal(of, {}, batches);
}

TEST(Scale, F01_TheNormDoesNotDependOnTheNumberOfMicroBatches) {
  // Four sequences as 1, 2 and 4 micro-batches: equal but for rounding.
  std::vector<double> norms;
  for (const int m : {1, 2, 4}) {
    Batches batches(1);
    for (int j = 0; j < m; ++j) {
      HostBatch batch;
      batch.cu_seqlens = {0};
      for (int k = j * 4 / m; k < (j + 1) * 4 / m; ++k) {
        const HostBatch one = make_batch_of(6, 5, k);
        batch.ids.insert(batch.ids.end(), one.ids.begin(), one.ids.end());
        batch.labels.insert(batch.labels.end(), one.labels.begin(),
                            one.labels.end());
        batch.cu_seqlens.push_back(static_cast<int32_t>(batch.ids.size()));
      }
      batches[0].push_back(batch);
    }
    LossOptions losses = test_losses(false);
    losses.balance = 0;  // is no sum over tokens
    const PipelineResult got =
        run({"1f1b", 2, 1, "Ett|ttL"}, {}, batches, losses);
    ASSERT_TRUE(got.status[0].ok());
    norms.push_back(got.steps[0].grad_norm);
  }
  EXPECT_NEAR(norms[1] / norms[0], 1, 1e-5);
  EXPECT_NEAR(norms[2] / norms[0], 1, 1e-5);
}

TEST(Scale, B17_APredictionDepthWithoutTargetsAddsNothing) {
  ModelShape shape;
  shape.depths = 2;
  Batches batches(2);
  for (auto& step : batches) {
    step = {make_batch_of(8, 6, 1), make_batch_of(5, 0, 2),
            make_batch_of(1, 1, 3)};  // no depth has a target in one token
  }
  expect_equal({"1f1b", 2, 1, "Ett|ttmmL"}, shape, batches);
  expect_equal({"zbv", 2, 2, "Et|tt|t|mmL"}, shape, batches);
}

TEST(Values, B20_ChunksKeepTheirInputsApart) {
  expect_equal({"interleaved", 2, 3, "E|t|t|t|t|L"}, {}, make_batches(2, 6));
}

// --- Auxiliary losses and routers

// The coefficient matters to every router on every stage, under every schedule.
TEST(Auxiliary, F02_B21_B22_B25_EveryLayersLossReachesItsRouter) {
  ModelShape shape;
  shape.mlp = "ssss";
  shape.depths = 1;
  const Batches batches = make_batches(1, 4);
  LossOptions with = test_losses(false), without = with;
  with.balance = 1;
  without.balance = without.z = 0;
  for (const char* name : {"1f1b", "interleaved", "zbv"}) {
    const bool one = std::string(name) == "1f1b";
    const Plan of = {name, 2, one ? 1 : 2, one ? "Ett|ttmL" : "Et|t|t|tmL"};
    for (const bool recompute : {false, true}) {
      StageMemory memory;
      memory.recompute.assign(5, recompute);
      const PipelineResult on = run(of, shape, batches, with, memory);
      const PipelineResult off = run(of, shape, batches, without, memory);
      EXPECT_EQ(difference(on, run_trainer(make_model(shape), batches, with)),
                "");
      int routers = 0;
      for (const auto& [tensor, gradient] : on.gradients) {
        if (!absl::EndsWith(tensor, "mlp.gate.weight")) continue;
        ++routers;
        EXPECT_NE(gradient, off.gradients.at(tensor)) << tensor;
      }
      EXPECT_EQ(routers, 5);
      EXPECT_GT(on.steps[0].balance, 0);
      EXPECT_EQ(off.steps[0].balance, 0);
    }
  }
}

TEST(Auxiliary, F03_RouterBiasesOfEveryStageMove) {
  ModelShape shape;
  shape.mlp = "ssss";
  const Batches batches = make_batches(3, 3);
  for (const Plan& of :
       {Plan{"1f1b", 4, 1, "Et|t|t|tL"}, Plan{"zbv", 2, 2, "Et|t|t|tL"}}) {
    const PipelineResult got = run(of, shape, batches, test_losses(false));
    int biases = 0;
    for (const auto& [name, values] : got.tensors) {
      if (!absl::EndsWith(name, "e_score_correction_bias")) continue;
      ++biases;
      EXPECT_TRUE(std::any_of(values.begin(), values.end(), [](float b) {
        return b != 0;
      })) << name;
    }
    EXPECT_EQ(biases, 4);
  }
}

// Counted once whether or not a layer runs again.
TEST(Auxiliary, B26_B27_CountsAreTokensTimesExpertsPerToken) {
  ModelShape shape;
  shape.depths = 2;
  const Batches batches = make_batches(1, 4);
  int64_t tokens = 0;
  for (const HostBatch& batch : batches[0]) {
    tokens += static_cast<int64_t>(batch.ids.size());
  }
  for (const bool recompute : {false, true}) {
    StageMemory memory;
    memory.recompute.assign(5, recompute);
    const PipelineResult got = run({"zb1p", 2, 2, "Et|tt|t|mmL"}, shape,
                                   batches, test_losses(false), memory);
    ASSERT_EQ(got.expert_counts.size(), 5u);
    for (const auto& [layer, counts] : got.expert_counts) {
      int64_t sum = 0;
      for (const int64_t n : counts) sum += n;
      const int64_t uses = layer == 0 ? 0 : layer == 4 ? 2 : 1;
      EXPECT_EQ(sum, uses * tokens * 2) << "layer " << layer;
    }
  }
}

TEST(Auxiliary, F05_B10_StagesOfDenseLayersAloneRun) {
  ModelShape shape;
  shape.mlp = "dssd";
  const Batches batches = make_batches(2, 3);
  expect_equal({"1f1b", 4, 1, "Et|t|t|tL"}, shape, batches);  // first and last
  shape.mlp = "dddd";
  expect_equal({"zbv", 2, 2, "Et|t|t|tL"}, shape, batches);
  shape.mlp = "dsds";
  expect_equal({"interleaved", 2, 2, "Et|t|t|tL"}, shape, batches);
}

// --- Prediction depths and shared weights

TEST(Depths, F04_TheEmbeddingIsThereWhereDepthsAre) {
  ModelShape shape;
  const Batches batches = make_batches(3, 4);
  for (const bool tied : {false, true}) {
    for (const bool share : {false, true}) {
      for (const int depths : {1, 2}) {
        shape.depths = depths;
        shape.tied = tied;
        shape.share_depths = share;
        const std::string m(static_cast<size_t>(depths), 'm');
        expect_equal({"1f1b", 2, 1, "Ett|tt" + m + "L"}, shape, batches);
        expect_equal({"1f1b", 3, 1, "Etttt|" + m + "|L"}, shape, batches);
        expect_equal({"zbv", 2, 2, "Et|t|tt|" + m + "L"}, shape, batches);
      }
    }
  }
}

// Ranks that hold the embedding have the same bits after 20 steps (the harness
// compares them), it counts once in the norm, and the plain loop has them too.
TEST(Shared, B12_B30_TiedWeightsStayEqual) {
  ModelShape shape;
  shape.tied = true;
  shape.depths = 1;
  const Batches batches = make_batches(20, 2);
  const Plan of = {"1f1b", 3, 1, "Ett|ttm|L"};
  const PipelineResult got = run(of, shape, batches, test_losses(false));
  EXPECT_EQ(difference(got, run_trainer(make_model(shape), batches,
                                        test_losses(false))),
            "");
  EXPECT_EQ(got.owners.at("model.embed_tokens.weight"), 3);
}

// The selection travels where a stage begins on a layer that shares it.
TEST(Selection, CrossesStages) {
  ModelShape shape;
  shape.indexers = "FSSS";
  const Batches batches = make_batches(2, 4);
  for (const Plan& of : spread()) expect_equal(of, shape, batches);
  const PipelineResult crossing =
      run({"1f1b", 2, 1, "Ett|ttL"}, shape, batches, test_losses(false));
  shape.indexers = "FSFS";
  const PipelineResult own =
      run({"1f1b", 2, 1, "Ett|ttL"}, shape, batches, test_losses(false));
  EXPECT_GT(crossing.counters[0].sent_bytes, own.counters[0].sent_bytes);
  // Gradients come back for the hidden state alone.
  EXPECT_EQ(crossing.counters[1].sent_bytes, own.counters[1].sent_bytes);
}

// --- Clip

TEST(Clip, B28_B29_TheNormIsThatOfAllStagesInOneOrder) {
  const Batches batches = make_batches(3, 4);
  LossOptions losses = test_losses(false);
  losses.z = 50;  // large gradients in few tensors
  const PipelineResult want = run_trainer(make_model({}), batches, losses);
  for (const StepLosses& step : want.steps) EXPECT_GT(step.grad_norm, 1);
  for (const Plan& of : spread()) {
    const PipelineResult got = run(of, {}, batches, losses);
    EXPECT_EQ(difference(got, want), "") << of.schedule;
  }
}

// --- Recomputation

// Twice, never three times, also where W runs apart from I.
TEST(Recompute, B38_ALayerRunsAgainOnce) {
  const Batches batches = make_batches(2, 5);
  for (const Plan& of : spread()) {
    for (const bool recompute : {false, true}) {
      StageMemory memory;
      memory.recompute.assign(4, recompute);
      const int64_t before = checkpoint_counters().replays;
      const PipelineResult got =
          run(of, {}, batches, test_losses(false), memory);
      const int64_t replays = checkpoint_counters().replays - before;
      ASSERT_TRUE(got.status[0].ok());
      EXPECT_EQ(replays, recompute ? 2 * 5 * 4 : 0) << of.schedule;
    }
  }
}

// --- Ownership

MlaLm specs_of(const ModelShape& shape) {
  MlaLmConfig c = parse_glm_moe_dsa(make_model(shape).json).value();
  c.mtp_depths = shape.depths;
  return MlaLm{std::make_shared<const MlaLmConfig>(c)};
}

TEST(Ownership, F11_B40_StagesHaveEveryTensorOnce) {
  ModelShape shape;
  shape.depths = 1;
  for (const bool tied : {false, true}) {
    shape.tied = tied;
    MlaLm model = specs_of(shape);
    for (const char* text :
         {"EttttmL", "Ett|ttmL", "Ettt|t|mL", "E|t|ttt||mL", "Etttt|m|L"}) {
      const Layout layout = layout_of(text, shape);
      std::map<std::string, int> owners;
      for (size_t s = 0; s < layout.size(); ++s) {
        for (const NamedTensor& t :
             model.named_tensors(layout, static_cast<int>(s))) {
          ++owners[t.name];
        }
      }
      const std::vector<NamedTensor> all = model.named_tensors();
      EXPECT_EQ(owners.size(), all.size()) << text;
      for (const NamedTensor& t : all) {
        if (t.name == "model.embed_tokens.weight") continue;
        EXPECT_EQ(owners[t.name], 1) << text << " " << t.name;
      }
    }
  }
}

// Values are functions of names, so a stage has those of the whole model.
TEST(Ownership, F09_InitialValuesDoNotDependOnTheCut) {
  ModelShape shape;
  shape.depths = 1;
  MlaLm whole = specs_of(shape);
  initialize(whole.named_tensors(), DType::kF32, 5);
  std::map<std::string, std::vector<float>> want;
  for (const NamedTensor& t : whole.named_tensors()) {
    want[t.name] = t.value().to_vector<float>();
  }
  const Layout layout = layout_of("Et|ttt|mL", shape);
  for (int s = 0; s < 3; ++s) {
    MlaLm part = specs_of(shape);
    const std::vector<NamedTensor> tensors = part.named_tensors(layout, s);
    initialize(tensors, DType::kF32, 5);
    EXPECT_FALSE(tensors.empty());
    for (const NamedTensor& t : tensors) {
      EXPECT_EQ(t.value().to_vector<float>(), want.at(t.name)) << t.name;
    }
    // The rest takes no memory.
    int without = 0;
    for (const NamedTensor& t : part.named_tensors()) {
      without += t.parameter != nullptr && !t.parameter->defined();
    }
    EXPECT_GT(without, 0);
  }
}

}  // namespace
}  // namespace tapeline
