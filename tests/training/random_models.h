// Random small models of the latent-attention family, and random ways to run
// them in less memory, which change no bit. What is drawn is counted: a test
// that never draws a feature shows nothing about it.
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "autograd/checkpoint.h"
#include "autograd/memory_plan.h"
#include "autograd/offload.h"
#include "models/batch.h"
#include "models/mla_lm.h"
#include "runtime/json.h"

namespace tapeline {

class Draw {
 public:
  explicit Draw(uint32_t seed) : random_(seed) {}
  int64_t operator()(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }
  bool coin() { return (*this)(0, 1) == 1; }
  void shuffle(std::vector<int>& values);

 private:
  std::mt19937 random_;
};

// $TAPELINE_TEST_SEED, or another one each time; prints it.
uint32_t test_seed();

using Features = std::map<std::string, int>;

struct RandomModel {
  Json json;  // config.json
  int mtp_depths = 0;
  bool train_indexer = false, absorbed = true;
  int micro_batches = 1;

  int64_t layers() const { return json.find("num_hidden_layers")->integer(); }
  int64_t total_layers() const { return layers() + (mtp_depths > 0 ? 1 : 0); }
  MlaLmConfig config() const;
};

// Models number 0, 1, ... of a run. Of every eight each has its share of every
// feature.
class ModelDeck {
 public:
  ModelDeck(Draw& draw, Features& features);
  RandomModel next();

 private:
  int dealt(const std::string& feature, std::vector<int> values);

  Draw& draw_;
  Features& features_;
  std::map<std::string, std::vector<int>> decks_;
};

// How a pass is run.
struct MemoryChoices {
  std::vector<bool> recompute;  // by layer; empty: none
  std::vector<std::string> keep;
  bool drop_norms = false, nested = false;
  OffloadChoice offload;
};
enum class Moves { kNothing, kActivations, kIds, kBoth, kSomeLayers };
MemoryChoices draw_choices(Draw& draw, const RandomModel& model, Moves moves,
                           bool nested, Features& features);

// 1 to 3 sequences.
HostBatch draw_batch(Draw& draw);

// Backward of micro-batches in flight: each after its forward; all after the
// last forward, in order or in reverse.
enum class Order { kOneByOne, kForwardsFirst, kReversed };

// What a step made, by name, and what it took.
struct StepResult {
  std::map<std::string, std::vector<float>> values;
  CheckpointCounters counters;
  OffloadCounters moved;
  int64_t refills = 0, demand_reloads = 0, planned_bytes = 0;
  std::vector<std::string> ops;  // recorded, as "path op", of all micro-batches
};
StepResult run_step(const RandomModel& model,
                    const std::vector<HostBatch>& batches, Order order,
                    const MemoryChoices& choices);

// What the choices should take: from the model's description and from the ops
// that a plain run of the same batches recorded.
struct PlannedWork {
  int64_t replays = 0, stash_reads = 0, kept_ops = 0, refills = 0;
};
PlannedWork planned_work(const RandomModel& model, const MemoryChoices& choices,
                         const std::vector<std::string>& plain_ops);

void expect_same(const StepResult& got, const StepResult& want);

}  // namespace tapeline
