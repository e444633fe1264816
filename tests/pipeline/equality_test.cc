// Equality of schedules: whatever the schedule, the ranks, the chunks and the
// layout, three steps have the bits of the trainer's plain loop: losses, every
// gradient, the clip norm, router biases and every parameter.
//
//   bazel run //tests/pipeline:equality_test -- --cases 1000 --seed 7
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "autograd/checkpoint.h"
#include "autograd/tape.h"
#include "dist/gloo_communicator.h"
#include "dist/launch.h"
#include "dist/pipeline/generators.h"
#include "dist/pipeline/layout.h"
#include "dist/pipeline/operations.h"
#include "dist/pipeline/text.h"
#include "dist/pipeline/validator.h"
#include "gtest/gtest.h"
#include "runtime/check.h"
#include "tests/pipeline/job.h"
#include "tests/pipeline/pipeline_run.h"
#include "tests/training/random_models.h"

namespace tapeline {

std::string program;
int64_t cases = 200;
std::optional<uint32_t> seed;

namespace {

constexpr int kSteps = 3, kProcesses = 4, kProcessCases = 11;

// Parts in order with bars between them at random: stages are uneven, some are
// empty. Depths of a shared layer stay together.
std::string draw_layout(Draw& d, int layers, int depths, int stages,
                        bool depths_apart) {
  std::vector<std::string> parts = {"E"};
  for (int i = 0; i < layers; ++i) parts.push_back("t");
  if (depths_apart) {
    for (int i = 0; i < depths; ++i) parts.push_back("m");
  } else if (depths > 0) {
    parts.push_back(std::string(static_cast<size_t>(depths), 'm'));
  }
  parts.push_back("L");
  // How many bars before each part, and behind the last.
  std::vector<int> bars(parts.size() + 1, 0);
  for (int i = 1; i < stages; ++i) {
    const int64_t most = static_cast<int64_t>(parts.size());
    // Ends are empty less often.
    const int64_t at = d(0, 9) == 0 ? d(0, most) : d(1, most - 1);
    ++bars[static_cast<size_t>(at)];
  }
  std::string out;
  for (size_t i = 0; i <= parts.size(); ++i) {
    out.append(static_cast<size_t>(bars[i]), '|');
    if (i < parts.size()) out += parts[i];
  }
  return out;
}

PipelineModel gqa_model(Draw& d, int layers, bool tied) {
  PipelineModel out;
  out.json = Json::Object{};
  Json& j = out.json;
  const bool moe = d.coin();
  j["model_type"] = moe ? "qwen3_moe" : "qwen3";
  j["vocab_size"] = 40;
  j["hidden_size"] = 16;
  j["num_hidden_layers"] = layers;
  j["intermediate_size"] = 24;
  j["num_attention_heads"] = 2;
  j["num_key_value_heads"] = 1;
  j["head_dim"] = 8;
  j["tie_word_embeddings"] = tied;
  if (moe) {
    j["num_experts"] = 4;
    j["num_experts_per_tok"] = 2;
    j["moe_intermediate_size"] = 12;
    j["norm_topk_prob"] = true;
    j["mlp_only_layers"] = Json::Array{Json(int64_t{0})};
  }
  return out;
}

struct Case {
  PipelineModel model;
  bool train_indexer = false;
  int layers = 0, depths = 0, total_layers = 0;
  bool depths_apart = false;
};

Case draw_model(Draw& d, ModelDeck& deck, Features& features, int64_t number) {
  Case out;
  if (number % 8 == 7) {
    out.layers = static_cast<int>(d(1, 4));
    out.total_layers = out.layers;
    out.model = gqa_model(d, out.layers, d.coin());
    ++features[out.model.json.find("model_type")->string()];
    return out;
  }
  RandomModel model = deck.next();
  if (model.mtp_depths == 2 && d.coin()) {
    // A layer per depth, so that stages may part them.
    model.json["num_nextn_predict_layers"] = 2;
    out.depths_apart = true;
    ++features["depths with layers of their own"];
  }
  out.layers = static_cast<int>(model.layers());
  out.depths = model.mtp_depths;
  out.train_indexer = model.train_indexer;
  out.total_layers = out.layers + (out.depths_apart ? 2
                                   : out.depths > 0 ? 1
                                                    : 0);
  out.model.json = model.json;
  out.model.choices.mtp_depths = model.mtp_depths;
  out.model.choices.absorbed = model.absorbed;
  if (d.coin()) {
    out.model.choices.mtp_after_norm = true;
    features["depths behind the norm"] += out.depths > 0;
  }
  if (model.train_indexer) {
    out.model.choices.indexer = IndexerTraining::kSelectedKeys;
  }
  return out;
}

Batches draw_steps(Draw& d, int micro_batches, Features& features) {
  Batches steps(kSteps);
  for (auto& step : steps) {
    for (int j = 0; j < micro_batches; ++j) {
      HostBatch batch = draw_batch(d);
      if (j == 0) {  // so that the step has a loss
        batch.ids.insert(batch.ids.end(), {1, 2, 3, 4, 5, 6});
        batch.labels.insert(batch.labels.end(), {2, 3, 4, 5, 6, 7});
        batch.cu_seqlens.push_back(static_cast<int32_t>(batch.ids.size()));
      }
      step.push_back(std::move(batch));
    }
    if (micro_batches > 1) {
      HostBatch& none = step[static_cast<size_t>(d(1, micro_batches - 1))];
      std::fill(none.labels.begin(), none.labels.end(), -100);
      ++features["a micro-batch without a label"];
    }
  }
  return steps;
}

// Names take turns.
Schedule draw_schedule(Draw& d, int64_t number, Features& features) {
  const auto& names = schedule_names();
  const std::string& name = names[static_cast<size_t>(number) % names.size()];
  for (;;) {
    const int64_t p = d(1, 4), v = d(1, 3);
    const int64_t m = name == "dualpipev" ? d(2 * p, 2 * p + 2) : d(1, 6);
    const auto made = make_schedule(name, {p, v, m, d(0, 3)});
    if (!made.ok()) continue;
    ++features[name];
    ++features[absl::StrCat("ranks ", p)];
    ++features[absl::StrCat("chunks ", made->chunks())];
    features["fewer micro-batches than ranks"] += m < p;
    return *made;
  }
}

// The same work with micro-batches in another order, apart from what is added:
// W's ascend, at the end of each rank.
Schedule in_another_order(Draw& d, const Schedule& from) {
  std::vector<int> order(static_cast<size_t>(from.micro_batches));
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i-- > 1;) {
    std::swap(order[i],
              order[static_cast<size_t>(d(0, static_cast<int64_t>(i)))]);
  }
  Schedule out = from;
  for (std::vector<Action>& actions : out.ranks) {
    std::vector<Action> passes, weights;
    for (const Action& action : actions) {
      for (Pass p : action.passes()) {
        p.micro_batch = order[static_cast<size_t>(p.micro_batch)];
        if (p.makes_weight_gradient()) {
          weights.emplace_back(
              tapeline::pass(PassKind::kWeight, p.stage, p.micro_batch));
        }
        if (p.kind == PassKind::kBackward) p.kind = PassKind::kInput;
        if (p.kind != PassKind::kWeight) passes.emplace_back(p);
      }
    }
    std::stable_sort(
        weights.begin(), weights.end(), [](const Action& a, const Action& b) {
          return a.passes()[0].micro_batch < b.passes()[0].micro_batch;
        });
    passes.insert(passes.end(), weights.begin(), weights.end());
    actions = std::move(passes);
  }
  CHECK(!validate(out) && !check_order_of_sums(out)) << schedule_text(out);
  return out;
}

// 0, 1/2 or all passes recomputed; some offloaded.
void draw_attributes(Draw& d, Schedule& schedule, Features& features) {
  const int64_t share = d(0, 2), offloaded = d(0, 2);
  features[absl::StrCat("passes recomputed: ", share, " of 2")] += 1;
  features[absl::StrCat("passes offloaded: ", offloaded, " of 2")] += 1;
  for (auto& rank : schedule.ranks) {
    for (Action& action : rank) {
      for (Pass& p : action.passes()) {
        if (!p.is_forward()) continue;
        p.recompute = share == 2 || (share == 1 && d.coin());
        p.offload = offloaded == 2 || (offloaded == 1 && d.coin());
      }
    }
  }
}

struct Totals {
  int64_t passes = 0, messages = 0, handed = 0, replays = 0, moved = 0;
  int64_t offers = 0;
};

// All that a case is.
struct Drawn {
  int64_t number = 0;
  Case of;
  Schedule schedule;
  Layout layout;
  Batches steps;
  LossOptions losses;
  StageMemory memory;
  ThreadOptions threads;
  std::string text;  // for a report
};

void count_layout(const Drawn& drawn, Features& features) {
  const Json* first = drawn.of.model.json.find("first_k_dense_replace");
  const int64_t dense = first != nullptr ? first->integer() : 0;
  for (const StageParts& parts : drawn.layout) {
    features["an empty stage"] += !parts.embedding && !parts.head &&
                                  parts.layers == 0 && parts.depths == 0;
    features["a stage of dense layers alone"] +=
        parts.layers > 0 && parts.first_layer + parts.layers <= dense;
    features["a head apart from the layers"] += parts.head && parts.layers == 0;
    features["depths apart from the head"] += parts.depths > 0 && !parts.head;
    features["a stage with a part of the depths"] +=
        parts.depths > 0 && parts.depths < drawn.of.depths;
  }
}

// `ranks` 0: any number.
Drawn draw_case(Draw& d, ModelDeck& deck, Features& features, int64_t number,
                int ranks) {
  Drawn out;
  out.number = number;
  out.of = draw_model(d, deck, features, number);
  do {
    out.schedule = draw_schedule(d, number, features);
  } while (ranks > 0 && static_cast<int>(out.schedule.ranks.size()) != ranks);
  if (number % 4 == 1) {
    const Schedule as_made = out.schedule;
    out.schedule = in_another_order(d, as_made);
    features["micro-batches in another order"] +=
        out.schedule.ranks[0][0] != as_made.ranks[0][0];
  }
  draw_attributes(d, out.schedule, features);
  std::optional<Layout> layout;
  while (!layout) {
    out.text = draw_layout(d, out.of.layers, out.of.depths,
                           out.schedule.stages(), out.of.depths_apart);
    const auto parsed =
        parse_layout(out.text, "layout",
                     {.depths_share_a_layer = !out.of.depths_apart,
                      .layers = out.of.layers,
                      .depths = out.of.depths});
    if (parsed.ok()) layout = *parsed;
  }
  out.layout = *layout;
  out.text =
      absl::StrCat("case ", number, " layout ", out.text, "\n",
                   schedule_text(out.schedule), out.of.model.json.dump());
  count_layout(out, features);
  out.steps = draw_steps(d, out.schedule.micro_batches, features);
  out.losses = test_losses(out.of.train_indexer);
  out.memory.strict_offload = true;
  out.memory.drop_norms = d.coin();
  if (d.coin()) {
    for (int i = 0; i < out.of.total_layers; ++i) {
      out.memory.recompute.push_back(d.coin());
    }
    ++features["layers recomputed"];
  }
  out.memory.offload.activations = d(0, 3) == 0;
  out.memory.offload.ids = d(0, 3) == 0;
  out.threads.seed = static_cast<uint64_t>(number);
  out.threads.order = static_cast<ArrivalOrder>(d(0, 2));
  if (d(0, 3) == 0) out.threads.max_delay = absl::Microseconds(100);
  if (d.coin()) {
    out.threads.capacity = *min_capacity(out.schedule, OvRelease::kEarly);
    ++features["least capacity"];
  }
  return out;
}

PipelineResult run(const Drawn& drawn, Communicator* process = nullptr) {
  return run_pipeline(drawn.of.model, drawn.layout, drawn.schedule, drawn.steps,
                      drawn.losses, drawn.memory, drawn.threads, process);
}

void run_case(const Drawn& drawn, Features& features, Totals& totals) {
  SCOPED_TRACE(drawn.text);
  const Schedule& schedule = drawn.schedule;
  const int64_t nodes = live_nodes();
  const PipelineResult want =
      run_trainer(drawn.of.model, drawn.steps, drawn.losses);
  const int64_t before = checkpoint_counters().replays;
  const PipelineResult got = run(drawn);
  const int64_t replays = checkpoint_counters().replays - before;
  ASSERT_EQ(difference(got, want), "");
  EXPECT_GT(want.gradients.size(), 5u);
  features["router biases moved"] += !want.router_biases.empty();

  // The pipeline's path, not the loop's.
  EXPECT_EQ(live_nodes(), nodes);
  EXPECT_TRUE(got.stages.offload_status.ok()) << got.stages.offload_status;
  EXPECT_EQ(got.stages.moved.copied_bytes, got.stages.planned_bytes);
  EXPECT_EQ(got.stages.forwards,
            int64_t{kSteps} * schedule.stages() * schedule.micro_batches);
  const std::vector<int> sent = messages_sent(schedule);
  for (size_t r = 0; r < schedule.ranks.size(); ++r) {
    const ExecutorCounters& c = got.counters[r];
    EXPECT_EQ(c.sent, sent[r]);
    EXPECT_EQ(c.nodes_left, 0);
    totals.passes += c.actions();
    totals.messages += c.sent;
    totals.handed += c.handed;
    totals.offers += c.offers;
  }
  for (const auto& [name, ranks] : got.owners) {
    features["a tensor on several ranks"] += ranks > 1;
  }
  totals.replays += replays;
  totals.moved += got.stages.moved.copied_bytes;
}

TEST(Equality, RandomPipelinesHaveTheBitsOfThePlainLoop) {
  const uint32_t of = seed ? *seed : test_seed();
  Draw d(of);
  Features features;
  ModelDeck deck(d, features);
  Totals totals;
  for (int64_t number = 0; number < cases; ++number) {
    run_case(draw_case(d, deck, features, number, /*ranks=*/0), features,
             totals);
    if (HasFatalFailure() || HasNonfatalFailure()) {
      std::cout << "--seed " << of << ", case " << number << "\n";
      return;
    }
  }
  std::cout << cases << " cases: " << totals.passes << " passes, "
            << totals.messages << " messages, " << totals.handed
            << " handed over, " << totals.offers << " offers, "
            << totals.replays << " replays, " << totals.moved
            << " bytes moved\n";
  for (const auto& [name, count] : features) {
    std::cout << "  " << name << ": " << count << "\n";
  }
  EXPECT_GT(totals.messages, 0);
  EXPECT_GT(totals.handed, 0);
  EXPECT_GT(totals.offers, 0);
  EXPECT_GT(totals.replays, 0);
  EXPECT_GT(totals.moved, 0);
  if (cases < 200) return;
  for (const char* feature : {"an empty stage",
                              "a stage of dense layers alone",
                              "a head apart from the layers",
                              "depths apart from the head",
                              "a stage with a part of the depths",
                              "a micro-batch without a label",
                              "fewer micro-batches than ranks",
                              "micro-batches in another order",
                              "tied head",
                              "head of its own",
                              "trained indexer",
                              "MTP depths 2",
                              "MTP depths 3",
                              "a layer that shares its selection",
                              "depths share a selection",
                              "depths behind the norm",
                              "depths with layers of their own",
                              "layers recomputed",
                              "passes recomputed: 0 of 2",
                              "passes recomputed: 1 of 2",
                              "passes recomputed: 2 of 2",
                              "passes offloaded: 2 of 2",
                              "least capacity",
                              "router biases moved",
                              "a tensor on several ranks",
                              "qwen3",
                              "qwen3_moe",
                              "ranks 1",
                              "ranks 2",
                              "ranks 3",
                              "ranks 4",
                              "chunks 1",
                              "chunks 2",
                              "chunks 3"}) {
    EXPECT_GT(features[feature], 0) << feature << " was never drawn";
  }
  for (const std::string& name : schedule_names()) {
    EXPECT_GT(features[name], 0) << name;
  }
}

// What the tests above compare by sees each kind of difference.
TEST(Harness, ADifferenceOfAnyKindIsNamed) {
  PipelineResult want;
  want.steps = {{.loss = 1, .lm = 1}};
  want.tensors["a"] = {1, 2, 3};
  want.gradients["a"] = {0, 0};
  want.expert_counts = {{0, {}}, {1, {4, 2}}};
  PipelineResult same = want;
  same.expert_counts.erase(0);
  EXPECT_EQ(difference(same, want), "");
  PipelineResult read;
  add_result(result_text(want), read);
  EXPECT_EQ(difference(read, want), "");
  EXPECT_EQ(read.expert_counts, want.expert_counts);

  const auto changed = [&](const auto& change) {
    PipelineResult got = want;
    change(got);
    return difference(got, want);
  };
  EXPECT_EQ(changed([](auto& r) { r.tensors["a"].pop_back(); }),
            "a has 2 elements, not 3");
  EXPECT_EQ(changed([](auto& r) { r.tensors["a"].push_back(0); }),
            "a has 4 elements, not 3");
  EXPECT_EQ(changed([](auto& r) { r.tensors["a"][1] = 5; }), "a");
  EXPECT_EQ(changed([](auto& r) { r.tensors.clear(); }), "a is missing");
  EXPECT_EQ(changed([](auto& r) { r.tensors["b"] = {}; }), "more tensors");
  EXPECT_EQ(changed([](auto& r) { r.gradients["a"][0] = -0.f; }),
            "gradient of a");
  EXPECT_EQ(changed([](auto& r) {
              r.expert_counts[1] = {3, 3};
            }),
            "expert counts of layer 1");
  EXPECT_EQ(changed([](auto& r) { r.expert_counts.erase(1); }),
            "expert counts of layer 1");
  EXPECT_EQ(changed([](auto& r) { r.expert_counts[7] = {1}; }),
            "expert counts of layer 7");
  EXPECT_EQ(changed([](auto& r) { r.steps.clear(); }), "steps");
}

// Cases of four ranks, numbered alike in every process of a seed.
Drawn process_case(uint32_t of, int64_t number) {
  Draw d(of);
  Features features;
  ModelDeck deck(d, features);
  for (int64_t i = 0; i < number; ++i) {
    draw_case(d, deck, features, i, kProcesses);
  }
  return draw_case(d, deck, features, number, kProcesses);
}

TEST(Equality, ProcessesHaveTheBitsOfThePlainLoop) {
  const uint32_t of = seed ? *seed : test_seed();
  for (int64_t number = 0; number < kProcessCases; ++number) {
    const Drawn drawn = process_case(of, number);
    SCOPED_TRACE(drawn.text);
    const std::vector<Ended> ended =
        run_job(kProcesses, [&](int, const std::string& out) {
          return std::vector<std::string>{
              program,  "--process_case", absl::StrCat(number),
              "--seed", absl::StrCat(of), "--out",
              out};
        });
    PipelineResult got;
    for (const Ended& rank : ended) {
      ASSERT_EQ(rank.code, 0) << rank.err;
      add_result(rank.out, got);
    }
    ASSERT_EQ(
        difference(got, run_trainer(drawn.of.model, drawn.steps, drawn.losses)),
        "");
  }
}

}  // namespace

// One rank of a case, started by the test above.
int run_process(int64_t number, const std::string& out) {
  const absl::StatusOr<Launched> launch = read_launch(process_environment());
  CHECK(launch.ok() && seed);
  auto communicator = GlooCommunicator::connect(*launch);
  CHECK(communicator.ok()) << communicator.status().message();
  const PipelineResult got =
      run(process_case(*seed, number), communicator->get());
  CHECK(got.status[launch->rank].ok()) << got.status[launch->rank].message();
  CHECK((*communicator)->barrier(absl::Minutes(1)).ok());
  std::ofstream(out) << result_text(got);
  return 0;
}

}  // namespace tapeline

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  tapeline::program = argv[0];
  int64_t process_case = -1;
  std::string out;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const size_t equals = flag.find('=');
    const std::string name = flag.substr(0, equals);
    const char* value = equals != std::string::npos ? argv[i] + equals + 1
                        : i + 1 < argc              ? argv[++i]
                                                    : "";
    if (name == "--cases") {
      tapeline::cases = std::strtoll(value, nullptr, 10);
    } else if (name == "--seed") {
      tapeline::seed = static_cast<uint32_t>(std::strtoul(value, nullptr, 10));
    } else if (name == "--process_case") {
      process_case = std::strtoll(value, nullptr, 10);
    } else if (name == "--out") {
      out = value;
    } else {
      std::cerr << "unknown flag " << flag << "; known: --cases, --seed\n";
      return 2;
    }
  }
  if (process_case >= 0) return tapeline::run_process(process_case, out);
  return RUN_ALL_TESTS();
}
