// Two GPUs over NCCL: a pipeline of two processes has the bits of one process
// on one GPU, whatever the schedule, goes on where another layout stopped, and
// is to end by itself when a rank dies or stalls. Skipped with fewer than two
// GPUs.
#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "runtime/cuda_device.h"
#include "runtime/file.h"
#include "tests/cli/child.h"
#include "tests/cli/expect.h"

namespace tapeline {
namespace {

int free_port() {
  const int s = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  EXPECT_EQ(bind(s, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(getsockname(s, reinterpret_cast<sockaddr*>(&address), &size), 0);
  close(s);
  return ntohs(address.sin_port);
}

class TwoGpus : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_devices() < 2) GTEST_SKIP() << cuda_devices() << " GPU";
    config_ = small_config(folder_);
  }

  Words words(const std::string& name, const Words& sets) const {
    Words out = {"train", "--config", config_};
    for (const std::string& set :
         Words{"device=cuda", "run.name=" + name, "pipeline.timeout=20"} +
             sets) {
      out.insert(out.end(), {"--set", set});
    }
    return out;
  }
  // Losses, norm and hashes of every step.
  std::vector<std::string> train(const std::string& name, int processes,
                                 const Words& sets, const Words& more = {}) {
    Words line = words(name, sets) + more;
    if (processes > 0) {
      line.insert(line.end(), {"--nproc", std::to_string(processes)});
    }
    const ChildResult r = tapeline_run(line);
    EXPECT_EQ(r.code, 0) << r.err;
    std::vector<std::string> out;
    for (const Json& row : lines_of(metrics(name))) {
      if (row.find("loss") == nullptr) continue;
      for (const char* key :
           {"loss", "lm_loss", "mtp_loss", "balance_loss", "z_loss",
            "indexer_loss", "grad_norm", "grad_hash", "param_hash"}) {
        out.push_back(row.find(key)->dump());
      }
      if (const Json* ms = row.find("pipeline_ms")) {
        ++pipelined_;
        EXPECT_GT(ms->number(), 0);
        // One rank sends no messages, and nor do replicas of one stage.
        EXPECT_TRUE(row.find("messages_exposed_ms")->is_number() ||
                    processes < 2 || name.starts_with("replicas"));
      }
    }
    return out;
  }
  std::string metrics(const std::string& name) const {
    return folder_ / ("runs/" + name + "/metrics.jsonl");
  }

  // Two processes that no launcher watches, once they have made a step.
  std::vector<std::unique_ptr<Child>> start(const std::string& name) {
    const std::string port = std::to_string(free_port());
    std::vector<std::unique_ptr<Child>> ranks;
    for (int r = 0; r < 2; ++r) {
      ChildOptions options;
      options.environment = {
          {"RANK", std::to_string(r)},  {"LOCAL_RANK", std::to_string(r)},
          {"WORLD_SIZE", "2"},          {"LOCAL_WORLD_SIZE", "2"},
          {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port},
          {"TAPELINE_STORE_PORT", port}};
      ranks.push_back(std::make_unique<Child>(
          words(name, {"train.steps=100000", "data.val=",
                       "train.snapshot_every=0", "pipeline.timeout=5"}),
          options));
    }
    while (ranks[0]->running() && ranks[1]->running()) {
      const auto text = read_file(metrics(name));
      if (text.ok() && std::count(text->begin(), text->end(), '\n') >= 2) break;
      usleep(20000);
    }
    return ranks;
  }

  TempFolder folder_;
  std::string config_;
  int64_t pipelined_ = 0;  // steps read
};

TEST_F(TwoGpus, HaveTheBitsOfOneUnderEverySchedule) {
  const std::vector<const char*> all = {"1f1b", "interleaved", "zb1p", "zbv",
                                        "v_min"};
  const std::map<std::string, std::vector<const char*>> names = {
      {"f32", all}, {"bf16", {"interleaved", "zbv"}}};
  for (const auto& [dtype, schedules] : names) {
    const Words sets = {"train.micro_batches=4", "train.save=false",
                        "data.val=", "compute_dtype=" + dtype};
    const std::vector<std::string> one = train("one_" + dtype, 0, sets);
    ASSERT_EQ(one.size(), 6u * 9u);
    for (const std::string schedule : schedules) {
      SCOPED_TRACE(schedule + " " + dtype);
      Words way = {"pipeline.schedule=" + schedule};
      if (schedule == "interleaved") way.push_back("pipeline.chunks=2");
      pipelined_ = 0;
      EXPECT_EQ(train(schedule + dtype, 2, sets + way), one);
      EXPECT_EQ(pipelined_, 6);
    }
  }
}

TEST_F(TwoGpus, TiedEndsAndRecomputationChangeNoBit) {
  const Words sets = {"model.tie_word_embeddings=true", "data.val="};
  const std::vector<std::string> one = train("one", 0, sets);
  EXPECT_EQ(train("two", 2, sets), one);
  EXPECT_EQ(train("full", 2, sets + Words{"recompute.policy=full"}), one);
}

TEST_F(TwoGpus, AsReplicasRepeatTheirBits) {
  const Words sets = {"pipeline.ranks=1", "data.val="};
  EXPECT_EQ(train("replicas1", 2, sets), train("replicas2", 2, sets));
}

TEST_F(TwoGpus, GoOnWhereAnotherLayoutStopped) {
  const Words sets = {"data.val="};
  const std::vector<std::string> one = train("one", 0, sets);
  for (const int first : {0, 2}) {
    const std::string name = "from" + std::to_string(first);
    train(name, first, sets + Words{"train.steps=2"});
    train(name, 2 - first, sets + Words{"train.steps=4"}, {"--resume"});
    EXPECT_EQ(train(name, first,
                    sets + Words{"train.steps=6", "pipeline.schedule=zbv"},
                    {"--resume"}),
              one);
  }
}

TEST_F(TwoGpus, ASurvivorEndsByItselfAndNamesTheOther) {
  for (const int signal : {SIGKILL, SIGSTOP}) {
    SCOPED_TRACE(signal);
    const auto ranks = start("fault" + std::to_string(signal));
    ASSERT_TRUE(ranks[0]->running());
    const absl::Time begin = absl::Now();
    ranks[1]->send(signal);
    const ChildResult r = ranks[0]->wait();
    EXPECT_EQ(r.code, 72) << r.err;
    EXPECT_LT(absl::Now() - begin, absl::Seconds(15));
    EXPECT_NE(r.err.find("rank 1"), std::string::npos) << r.err;
  }
}

}  // namespace
}  // namespace tapeline
