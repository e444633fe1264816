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

}  // namespace
}  // namespace tapeline
