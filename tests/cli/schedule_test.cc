// tapeline schedule: keys, files and exit codes.
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/file.h"
#include "runtime/json.h"
#include "tests/cli/child.h"
#include "tests/cli/expect.h"

namespace tapeline {
namespace {

Words made(const std::string& name, int ranks, int micro_batches) {
  return {"schedule",
          "--name",
          name,
          "--ranks",
          std::to_string(ranks),
          "--micro_batches",
          std::to_string(micro_batches)};
}

TEST(Schedule, JsonHasEveryFigure) {
  const ChildResult r =
      tapeline_run(made("zbv", 2, 4) +
                   Words{"--cost=F=1,I=1.25,W=.75", "--latency=0.1", "--json"});
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(r.err, "");
  const Json json = json_of(r.out);
  EXPECT_EQ(keys(json), (Words{"schema",
                               "name",
                               "ranks",
                               "chunks",
                               "micro_batches",
                               "placement",
                               "cost",
                               "latency",
                               "ov_release",
                               "makespan",
                               "busy",
                               "idle",
                               "idle_inside",
                               "bubble",
                               "peak_activations",
                               "peak_activations_at_i",
                               "peak_w_stash",
                               "messages_sent",
                               "min_capacity",
                               "slots",
                               "actions"}));
  EXPECT_EQ(json.find("chunks")->integer(), 2);
  EXPECT_EQ(json.find("placement")->dump(), "[0, 1, 1, 0]");
  EXPECT_EQ(json.find("cost")->dump(),
            "{\"F\": 1.0, \"I\": 1.25, \"W\": 0.75, \"B\": 2.0, \"OV\": 3.0}");
  EXPECT_NEAR(json.find("makespan")->number(), 25.55, 1e-9);
  EXPECT_EQ(json.find("min_capacity")->integer(), 1);
  EXPECT_EQ(json.find("actions")->array()[0].array()[3].string(), "3F0");
}

TEST(Schedule, WhatItPrintsIsAFileItReads) {
  const TempFolder folder;
  const ChildResult first = tapeline_run(made("dualpipev", 2, 5));
  ASSERT_EQ(first.code, 0) << first.err;
  const std::string file = folder.write("s.txt", first.out);
  const ChildResult valid = tapeline_run({"schedule", "--validate", file});
  EXPECT_EQ(valid.code, 0) << valid.err;
  EXPECT_EQ(valid.out, "valid\n");
  EXPECT_EQ(
      json_of(tapeline_run({"schedule", "--validate", file, "--json"}).out)
          .dump(),
      "{\"schema\": 1, \"valid\": true}");
  Json of_file =
      json_of(tapeline_run({"schedule", "--file", file, "--json"}).out);
  const Json of_name =
      json_of(tapeline_run(made("dualpipev", 2, 5) + Words{"--json"}).out);
  EXPECT_EQ(of_file.find("name")->string(), file);
  of_file["name"] = "dualpipev";
  EXPECT_EQ(of_file.dump(), of_name.dump());
}

TEST(Schedule, WritesCsvAndSvg) {
  const TempFolder folder;
  const std::string csv = folder / "s.csv", svg = folder / "s.svg";
  const ChildResult r =
      tapeline_run(made("1f1b", 2, 2) + Words{"--csv", csv, "--svg", svg});
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(read_file(csv).value(), "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
  EXPECT_TRUE(read_file(svg).value().starts_with("<svg"));
  EXPECT_EQ(tapeline_run({"schedule", "--validate", csv}).code, 0);
  expect_failure(tapeline_run(made("1f1b", 2, 2) +
                              Words{"--svg", folder / "absent/s.svg"}),
                 74, {"absent", "No such file"});
}

TEST(Schedule, AnInvalidFileEndsWith2AndNamesTheAction) {
  const TempFolder folder;
  const std::string file = folder.write(
      "s.txt",
      "schedule v1 ranks 2 stages 2 micro_batches 2 placement 0 1\n"
      "rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1\n");
  const Words parts = {"s.txt: cycle: rank 0, action 1 (0B0)",
                       "waits for 1B0 on rank 1"};
  const ChildResult r =
      tapeline_run({"schedule", "--validate", file, "--json"});
  expect_failure(r, 2, parts);
  const Json json = json_of(r.out);
  EXPECT_EQ(keys(json), (Words{"schema", "valid", "check", "rank", "index",
                               "action", "message"}));
  EXPECT_FALSE(json.find("valid")->boolean());
  EXPECT_EQ(json.find("check")->string(), "cycle");
  EXPECT_EQ(json.find("rank")->integer(), 0);
  EXPECT_EQ(json.find("index")->integer(), 1);
  EXPECT_EQ(json.find("action")->string(), "0B0");
  expect_failure(tapeline_run({"schedule", "--validate", file}), 2, parts);
  const ChildResult run = tapeline_run({"schedule", "--file", file, "--json"});
  expect_failure(run, 2, parts);
  EXPECT_EQ(run.out, "");
}

TEST(Schedule, MemoryIsCheckedOnRequest) {
  const Words words = made("1f1b", 4, 8);
  EXPECT_EQ(tapeline_run(words + Words{"--max_activations=4"}).code, 0);
  expect_failure(tapeline_run(words + Words{"--max_activations=3"}), 2,
                 {"memory: rank 0, action 3 (0F3)"});
}

TEST(Schedule, SizesThatItDoesNotHaveEndWith2) {
  expect_failure(tapeline_run(made("gpipe", 2, 4) + Words{"--chunks=2"}), 2,
                 {"gpipe needs chunks = 1, not 2"});
  expect_failure(tapeline_run(made("v_half", 2, 4) + Words{"--chunks=1"}), 2,
                 {"v_half needs chunks = 2, not 1"});
  expect_failure(tapeline_run(made("dualpipev", 4, 7)), 2,
                 {"at least 8 micro-batches, not 7"});
  expect_failure(tapeline_run(made("1f1b", 1000, 65536)), 2, {"lower one"});
}

TEST(Schedule, BadFilesEndWith2AndThePlace) {
  const TempFolder folder;
  expect_failure(tapeline_run({"schedule", "--file", folder / "no.txt"}), 2,
                 {"no.txt", "No such file"});
  const std::string bad =
      folder.write("bad.txt",
                   "schedule v1 ranks 1 stages 1 micro_batches 1 placement 0\n"
                   "rank 0: 0F0 0B0x\n");
  expect_failure(tapeline_run({"schedule", "--validate", bad}), 2,
                 {"bad.txt:2:16: expected a blank, not 'x'"});
  const Json json =
      json_of(tapeline_run({"schedule", "--validate", bad, "--json"}).out);
  EXPECT_FALSE(json.find("valid")->boolean());
  EXPECT_TRUE(json.find("check")->is_null());
}

TEST(Schedule, ALayoutMustHaveItsStages) {
  const ChildResult r = tapeline_run(
      made("interleaved", 2, 4) +
      Words{"--chunks=2", "--layout", "Et*3|t*4|t*4|t,mL", "--json"});
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(json_of(r.out).find("layout")->array()[1].dump(),
            "{\"embedding\": false, \"first_layer\": 3, \"layers\": 4, "
            "\"first_depth\": 0, \"depths\": 0, \"head\": false}");
  expect_failure(
      tapeline_run(made("1f1b", 2, 4) + Words{"--layout", "Et|t|tL"}), 2,
      {"--layout has 3 stages; the schedule has 2"});
  expect_failure(tapeline_run(made("1f1b", 2, 4) + Words{"--layout", "Etm|mL"}),
                 2, {"share one layer"});
}

TEST(Schedule, ALayoutWeighsItsStages) {
  const auto makespan = [](const Words& more) {
    const ChildResult r = tapeline_run(
        made("gpipe", 2, 4) + more + Words{"--cost=F=1,I=1.5,W=0.5", "--json"});
    EXPECT_EQ(r.code, 0) << r.err;
    return json_of(r.out).find("makespan")->number();
  };
  // One layer each: what a stage costs without a layout.
  EXPECT_EQ(makespan({"--layout", "Et|tL"}), makespan({}));
  // GPipe of unequal stages takes sum F + sum B + (m-1)(max F + max B).
  EXPECT_NEAR(makespan({"--layout", "Ettt|tmL"}), 5 + 10 + 3 * (3 + 6), 1e-9);
  EXPECT_NEAR(
      makespan({"--layout", "Ettt|tmL", "--part_cost", "E=0.5,t=1,m=2,L=4"}),
      10.5 + 21 + 3 * (7 + 14), 1e-9);
  expect_failure(tapeline_run(made("1f1b", 2, 4) + Words{"--part_cost", "t=1"}),
                 64, {"--part_cost goes with --layout"});
  expect_failure(tapeline_run(made("1f1b", 2, 4) +
                              Words{"--layout", "Et|tL", "--part_cost", "x=1"}),
                 64, {"--part_cost has 'x'; parts are E, t, m and L"});
}

TEST(Schedule, NumbersAreWithinBounds) {
  for (const char* cost : {"F=nan", "F=-1", "F=inf", "I=1e16"}) {
    expect_failure(tapeline_run(made("1f1b", 2, 4) + Words{"--cost", cost}), 64,
                   {std::string("--cost has '") + cost + "'"});
  }
  expect_failure(
      tapeline_run(made("1f1b", 2, 4) +
                   Words{"--layout", "Et|tL", "--part_cost", "t=nan"}),
      64, {"--part_cost has 't=nan'"});
  for (const char* flag : {"--chunks", "--group"}) {
    for (const char* value : {"0", "-1"}) {
      expect_failure(
          tapeline_run(made("interleaved", 2, 4) + Words{flag, value}), 64,
          {std::string(flag) + " must be at least 1"});
    }
  }
}

// Valid, but its sums have other bits than those of one process.
TEST(Schedule, TrainingRefusesSumsInAnotherOrder) {
  const TempFolder folder;
  const std::string file = folder.write(
      "s.txt",
      "schedule v1 ranks 2 stages 2 micro_batches 4 placement 0 1\r\n"
      "rank 0: 0F0 0F1 0F2 0F3 0B0 0B2 0B1 0B3\r\n"
      "rank 1: 1F0 1F1 1F2 1F3 1B0 1B2 1B1 1B3\r\n");
  const std::string guilty =
      "order: rank 0, action 6 (0B1): it comes after that of micro-batch 2";
  const ChildResult valid = tapeline_run({"schedule", "--validate", file});
  EXPECT_EQ(valid.code, 0) << valid.err;
  EXPECT_TRUE(
      valid.out.starts_with("valid; but training refuses it: " + guilty))
      << valid.out;
  const Json json =
      json_of(tapeline_run({"schedule", "--validate", file, "--json"}).out);
  EXPECT_EQ(keys(json), (Words{"schema", "valid", "refused_in_training"}));
  EXPECT_TRUE(json.find("valid")->boolean());

  const Words train = {"train",
                       "--config",
                       small_config(folder),
                       "--nproc",
                       "2",
                       "--set",
                       "train.steps=1",
                       "--set",
                       "train.micro_batches=4",
                       "--set",
                       "pipeline.file=" + file};
  const ChildResult r = tapeline_run(train);
  EXPECT_EQ(r.code, 2) << r.err;
  EXPECT_NE(r.err.find("s.txt: " + guilty), std::string::npos) << r.err;
  const ChildResult both =
      tapeline_run(train + Words{"--set", "pipeline.chunks=1"});
  EXPECT_EQ(both.code, 2);
  EXPECT_NE(both.err.find("pipeline.file and pipeline.chunks"),
            std::string::npos)
      << both.err;
}

// configs/mini.toml on an H200, from
// tools/results/pipeline_h200_2026-11-30.jsonl: of its layers two select keys,
// six share a selection.
constexpr char kMiniParts[] = R"({"layout": "Et|t|t|t|t|t|t|t|mL", "stages": [
  {"F": 2.273, "I": 4.197, "W": 0.462, "B": 4.661},
  {"F": 1.221, "I": 3.533, "W": 0.526, "B": 4.077},
  {"F": 1.221, "I": 3.533, "W": 0.526, "B": 4.077},
  {"F": 1.221, "I": 3.533, "W": 0.526, "B": 4.077},
  {"F": 2.346, "I": 4.328, "W": 0.547, "B": 4.887},
  {"F": 1.221, "I": 3.533, "W": 0.526, "B": 4.077},
  {"F": 1.221, "I": 3.533, "W": 0.526, "B": 4.077},
  {"F": 1.221, "I": 3.533, "W": 0.526, "B": 4.077},
  {"F": 2.483, "I": 4.596, "W": 0.666, "B": 5.271}]})";

TEST(Schedule, BalancesAModelByWhatItsPartsTake) {
  const TempFolder folder;
  const std::string parts = folder.write("parts.json", kMiniParts);
  const ChildResult r = tapeline_run(
      made("interleaved", 2, 16) +
      Words{"--chunks=2", "--latency=0.168", "--balance", parts, "--json"});
  ASSERT_EQ(r.code, 0) << r.err;
  const Json json = json_of(r.out);
  const Json& balance = *json.find("balance");
  EXPECT_EQ(keys(balance), (Words{"layout", "makespan", "busiest",
                                  "least_busiest", "proven", "even"}));
  const std::string layout = balance.find("layout")->string();
  EXPECT_EQ(layout, "Ettt|tt|tt|tmL");
  EXPECT_TRUE(balance.find("proven")->boolean());
  // Et and four layers that share a selection.
  EXPECT_NEAR(balance.find("busiest")->number(), 6.934 + 4 * 5.298, 1e-9);
  const Json& even = *balance.find("even");
  EXPECT_EQ(even.find("layout")->string(), "Ett|tt|tt|ttmL");
  EXPECT_NEAR(even.find("busiest")->number(), 7.754 + 4 * 5.298, 1e-9);
  EXPECT_LT(balance.find("makespan")->number(),
            even.find("makespan")->number());

  // The figures are those of the stages, given one by one.
  const auto stage = [](double f, double i, double w, double b) {
    Json out;
    out["F"] = f, out["I"] = i, out["W"] = w, out["B"] = b;
    return out;
  };
  Json stages;
  stages["stages"] =
      Json::Array{stage(2.273 + 2 * 1.221, 0, 0, 4.661 + 2 * 4.077),
                  stage(1.221 + 2.346, 0, 0, 4.077 + 4.887),
                  stage(2 * 1.221, 0, 0, 2 * 4.077),
                  stage(1.221 + 2.483, 0, 0, 4.077 + 5.271)};
  const ChildResult given =
      tapeline_run(made("interleaved", 2, 16) +
                   Words{"--chunks=2", "--latency=0.168", "--stage_cost",
                         folder.write("stages.json", stages.dump()), "--json"});
  ASSERT_EQ(given.code, 0) << given.err;
  EXPECT_NEAR(json_of(given.out).find("makespan")->number(),
              balance.find("makespan")->number(), 1e-9);
  EXPECT_EQ(json.find("makespan")->number(),
            balance.find("makespan")->number());

  // As text it is a file, with the layout in a comment.
  const ChildResult text =
      tapeline_run(made("zbv", 2, 16) + Words{"--balance", parts});
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_NE(text.out.find("# balanced E"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("# even Ett|tt|tt|ttmL: makespan "),
            std::string::npos)
      << text.out;
  EXPECT_EQ(tapeline_run(
                {"schedule", "--validate", folder.write("zbv.txt", text.out)})
                .code,
            0);
}

// As docs/pipeline.md says: measured, cut, trained.
TEST(Schedule, ALayoutOfMeasuredPartsTrains) {
  const TempFolder folder;
  const std::string config = small_config(folder);
  const ChildResult measured = tapeline_run(
      {"bench", "--config", config, "--set", "pipeline.ranks=6", "--set",
       "pipeline.layout=E|(t|)*3m|L", "--stages", "--repeats", "1", "--json"});
  ASSERT_EQ(measured.code, 0) << measured.err;
  EXPECT_EQ(json_of(measured.out).find("stages")->array().size(), 6u);
  const ChildResult cut = tapeline_run(
      made("zbv", 2, 4) +
      Words{"--json", "--balance", folder.write("parts.json", measured.out)});
  ASSERT_EQ(cut.code, 0) << cut.err;
  const std::string layout =
      json_of(cut.out).find("balance")->find("layout")->string();
  const ChildResult run = tapeline_run(
      {"train", "--config", config, "--nproc", "2", "--set", "train.steps=1",
       "--set", "train.micro_batches=4", "--set", "pipeline.schedule=zbv",
       "--set", "pipeline.layout=" + layout});
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_NE(run.out.find("stages " + layout), std::string::npos) << run.out;
}

TEST(Schedule, PartsToBalanceMustBeMeasured) {
  const TempFolder folder;
  const auto refused = [&](const std::string& json, const std::string& part) {
    expect_failure(
        tapeline_run(made("zbv", 2, 4) +
                     Words{"--balance", folder.write("p.json", json)}),
        2, {"p.json", part});
  };
  refused("{\"stages\": [{\"F\": 1, \"I\": 1, \"W\": 1}]}",
          "it has no text 'layout'");
  refused(
      "{\"layout\": \"Et|L\", \"stages\": [{\"F\": 1, \"I\": 1, \"W\": 1}]}",
      "its layout has 2 stages, its array 'stages' 1");
  refused("{\"layout\": \"t|L\", \"stages\": []}", "does not begin with E");
  refused("{\"layout\": \"EtL\", \"stages\": [{\"F\": 1, \"I\": 1}]}",
          "stage 0 lacks F, I or W");
  expect_failure(tapeline_run(made("zbv", 2, 4) +
                              Words{"--balance=p.json", "--layout=E|t|t|L"}),
                 64, {"--balance goes with none of"});
}

}  // namespace
}  // namespace tapeline
