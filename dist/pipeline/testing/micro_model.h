// A model small enough to run under every schedule: an embedding, a layer per
// stage with an auxiliary loss, and a head tied to the embedding. Micro-batches
// have unequal lengths, one has no label. Stages hand on the hidden state and
// integers that say who made them for which micro-batch, which the next one
// checks.
//
// The reference is a loop that records the whole model and runs it backward,
// one micro-batch after the other; it shares the layers' arithmetic with the
// stages and nothing else.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "dist/communicator.h"
#include "dist/pipeline/executor.h"
#include "dist/pipeline/schedule.h"
#include "dist/thread_communicator.h"

namespace tapeline {

struct MicroOptions {
  int64_t dim = 4, vocabulary = 6;
  bool tied = true;
  bool equal_lengths = false;
  bool frozen_layers = false;  // the layers in the middle do not learn
  bool shared_layers = false;  // each layer uses its weight twice
  ThreadOptions threads;
  ExecutorOptions executor;
  bool poison = true;
  bool dry = false;  // memory alone
  int steps = 1;     // gradients are of the last
  // Called in F of (stage, micro-batch) on its rank's thread; an error fails
  // it.
  std::function<absl::Status(int stage, int micro_batch)> on_forward;
  // What a stage says that it makes or is given, changed: a wrong shape.
  std::function<void(int stage, std::vector<TensorSpec>&)> on_inputs;
};

struct MicroResult {
  std::vector<float> losses;  // by micro-batch
  std::map<std::string, std::vector<float>> gradients;
  std::vector<absl::Status> status;        // by rank
  std::vector<ExecutorCounters> counters;  // by rank
  std::vector<int64_t> peak_activations;   // bytes, by rank, of the last step
  std::vector<int64_t> live_after;         // storages' bytes after the step
  std::vector<int64_t> stages_begun_not_ended;
  int64_t forwards = 0;  // calls of a layer
};

MicroResult micro_loop(int stages, int micro_batches,
                       const MicroOptions& options = {});
MicroResult micro_pipeline(const Schedule& schedule,
                           const MicroOptions& options = {});

// One rank on the calling thread: what it made, zeros elsewhere.
MicroResult micro_rank(const Schedule& schedule, Communicator& communicator,
                       const MicroOptions& options = {});

// The schedule with its ends tied.
Schedule with_tied_ends(Schedule schedule);

// Empty, or the first difference.
std::string difference(const MicroResult& got, const MicroResult& want);

}  // namespace tapeline
