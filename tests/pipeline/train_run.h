// `tapeline train` over processes, from outside: how tests start the built
// binary, and what they read of its run's folder.
#pragma once

#include <unistd.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "dist/tcp_store.h"
#include "gtest/gtest.h"
#include "runtime/file.h"
#include "runtime/json.h"
#include "tests/cli/child.h"

namespace tapeline {

using Words = std::vector<std::string>;

// What no cut of the model may change.
inline const Words& lasting_keys() {
  static const Words& keys = *new Words{
      "step",         "loss",     "lm_loss",      "mtp_loss",
      "balance_loss", "z_loss",   "indexer_loss", "lr",
      "grad_norm",    "tokens",   "skipped",      "grad_hash",
      "param_hash",   "val_loss", "val_bytes",    "val_bits_per_byte"};
  return keys;
}

inline std::vector<Json> rows(const std::string& run) {
  const std::string text = read_file(run + "/metrics.jsonl").value();
  std::istringstream lines(text);
  std::vector<Json> out;
  for (std::string line; std::getline(lines, line);) {
    out.push_back(parse_json(line, "row").value());
  }
  return out;
}

// One line per row of the lasting keys.
inline std::vector<std::string> lasting(const std::string& run) {
  std::vector<std::string> out;
  for (const Json& row : rows(run)) {
    Json kept = Json::Object();
    for (const std::string& key : lasting_keys()) {
      if (const Json* value = row.find(key)) kept[key] = *value;
    }
    out.push_back(kept.dump());
  }
  return out;
}

inline void expect_same(const std::vector<std::string>& got,
                        const std::vector<std::string>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) EXPECT_EQ(got[i], want[i]);
}

// Tensors of a folder: name -> dtype, shape, hash of the bytes.
inline std::map<std::string, std::string> tensors(const std::string& folder) {
  const ChildResult r = tapeline_run({"ckpt", "inspect", folder, "--json"});
  EXPECT_EQ(r.code, 0) << r.err;
  std::map<std::string, std::string> out;
  const Json json = parse_json(r.out, "inspect").value();
  for (const Json& t : json.find("tensors")->array()) {
    out[t.find("name")->string()] = t.find("dtype")->dump() +
                                    t.find("shape")->dump() +
                                    t.find("xxh3")->dump();
  }
  return out;
}

class Seconds {
 public:
  double operator()() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() -
                                         begin_)
        .count();
  }

 private:
  const std::chrono::steady_clock::time_point begin_ =
      std::chrono::steady_clock::now();
};

// Waits for its end that long.
inline bool ends_within(Child& child, double seconds) {
  const Seconds since;
  while (child.running()) {
    if (since() > seconds) return false;
    usleep(5000);
  }
  return true;
}

// Waits until it is so, or the child has ended.
inline void wait_until(Child& child, const std::function<bool()>& it_is) {
  while (child.running() && !it_is()) usleep(5000);
}

class Train : public testing::Test {
 protected:
  void SetUp() override { config_ = small_config(folder_); }

  std::string run(const std::string& name) const {
    return folder_ / ("runs/" + name);
  }
  ChildResult train(const std::string& name, int processes, const Words& sets,
                    const Words& more = {}, ChildOptions options = {}) const {
    return tapeline_run(words(name, processes, sets, more), options);
  }
  Words words(const std::string& name, int processes, const Words& sets,
              const Words& more = {}) const {
    Words out = {"train", "--config", config_, "--set", "run.name=" + name};
    if (processes > 0) {
      out.insert(out.end(), {"--nproc", std::to_string(processes)});
    }
    for (const std::string& set : sets) out.insert(out.end(), {"--set", set});
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
  // Processes with the variables of torchrun and no launcher; what each has of
  // its own is behind what all have.
  std::vector<std::unique_ptr<Child>> start_job(
      const Words& all, const std::vector<Words>& own) const {
    const std::string port =
        std::to_string(TcpStoreServer::start(0).value()->port());
    std::vector<std::unique_ptr<Child>> out;
    for (size_t r = 0; r < own.size(); ++r) {
      ChildOptions options;
      options.environment = {{"RANK", std::to_string(r)},
                             {"WORLD_SIZE", std::to_string(own.size())},
                             {"LOCAL_RANK", std::to_string(r)},
                             {"MASTER_ADDR", "127.0.0.1"},
                             {"MASTER_PORT", "29500"},
                             {"TAPELINE_STORE_PORT", port}};
      Words words = all;
      words.insert(words.end(), own[r].begin(), own[r].end());
      out.push_back(std::make_unique<Child>(words, options));
    }
    return out;
  }
  // The rows of one process under these settings.
  std::vector<std::string> reference(const std::string& name,
                                     const Words& sets) const {
    const ChildResult r = train(name, 0, sets);
    EXPECT_EQ(r.code, 0) << r.err;
    for (const Json& row : rows(run(name))) {
      const Json* bubble = row.find("bubble_measured");
      EXPECT_TRUE(bubble == nullptr || bubble->is_null());
    }
    return lasting(run(name));
  }

  TempFolder folder_;
  std::string config_;
};

inline Words operator+(Words a, const Words& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace tapeline
