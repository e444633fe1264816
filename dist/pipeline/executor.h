// Runs one rank's part of a schedule on tensors.
//
//   Executor executor(schedule, programs, communicator, stages, options);
//   RETURN_IF_ERROR(executor.step(grads));
//
// One tape per (stage, micro-batch): F records it, B or I sweeps it, W ends it,
// found by stage and micro-batch, never by order. B is I then W. What a stage
// hands on is a list of tensors; integer ones have no gradient. A value's bytes
// leave the rank as soon as the message has: of an output the tape keeps its
// position alone. Sums of weights that ranks share are exchanged by use site
// and added in the order of sites on each rank, as on one device.
//
// Nothing here divides: losses carry their denominators.
//
// After an error, whose message names rank, action and peer, the step has left
// nothing: tapes, messages and stage states are gone, the sums are zero, and
// the communicator is aborted. While a rank waits longer than warn_after, the
// position of every rank is reported; longer than deadline, it is an error.
// Used by one thread, on the device that is current there.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "autograd/gradients.h"
#include "autograd/tape.h"
#include "dist/communicator.h"
#include "dist/pipeline/lowering.h"
#include "dist/pipeline/schedule.h"
#include "runtime/device_marks.h"
#include "runtime/parameter.h"
#include "runtime/tensor.h"

namespace tapeline {

// What F makes: tensors for the next stage, and a number to minimise where the
// stage has a loss.
struct StageOutput {
  std::vector<Tensor> outputs;
  Tensor loss;
};

// A part of a model. It knows its micro-batches' data; what a micro-batch needs
// between its passes lives in the stage from forward() to end().
class Stage {
 public:
  virtual ~Stage() = default;
  // What the stage before hands over, and what this one does. Functions of the
  // data alone, so that a receiver knows them before anything runs.
  virtual std::vector<TensorSpec> inputs(int micro_batch) const = 0;
  virtual std::vector<TensorSpec> outputs(int micro_batch) const = 0;
  // Recorded on the micro-batch's tape. `pass` says whether it is recomputed or
  // offloaded.
  virtual absl::StatusOr<StageOutput> forward(
      const Pass& pass, const std::vector<Tensor>& inputs) = 0;
  // Once for each forward(): the micro-batch's backward is over, or it was
  // given up (`complete` false), maybe in forward().
  virtual void end(int micro_batch, bool complete) = 0;
};

// Weights of a replica group, as this rank has them.
struct ReplicaWeights {
  Parameter parameter;  // undefined where the rank has none
  // Use sites of each of the group's stages, in the group's order.
  std::vector<std::vector<int>> sites;
};

struct ExecutorOptions {
  absl::Duration warn_after = absl::Seconds(10);
  absl::Duration deadline = absl::Minutes(10);
  std::function<void(const std::string&)> warn;  // null: stderr
  // One for each of the schedule's groups.
  std::vector<ReplicaWeights> replicas;
  // The stage's gradients are complete: what copies of it do then. May be null.
  std::function<absl::Status(int stage)> reduce;
};

// What passes of one kind took where they ran, from when what they need was
// there.
struct PassTime {
  int64_t passes = 0, recomputed = 0;
  double seconds = 0;
};

// Of one step.
struct ExecutorCounters {
  int64_t forwards = 0, backwards = 0, inputs = 0, weights = 0;  // F B I W
  int64_t sent = 0, received = 0, handed = 0;
  int64_t sent_bytes = 0;
  int64_t offers = 0, collects = 0, reductions = 0;
  // Most (stage, micro-batch) between F and W or B, those that are recomputed
  // or offloaded only during their backward.
  int64_t most_kept = 0;
  int64_t most_sending = 0;   // messages that have not left
  int64_t most_slots = 0;     // asked for and not taken
  int64_t nodes_left = 0;     // of tapes when they were freed
  double waited_seconds = 0;  // of the host, for messages
  // From times() on: of the step, from the first instruction to the end of the
  // last pass, on the device.
  double seconds = 0;
  // In which the rank was idle while a message that it needed was under way;
  // absent where the host moves messages, or none came.
  std::optional<double> exposed_seconds;
  // By stage and kind. Their sum is the time in which the rank was not idle.
  std::map<std::pair<int, PassKind>, PassTime> passes;
  int64_t actions() const { return forwards + backwards + inputs + weights; }
};

class Executor {
 public:
  // `programs` of all ranks, for reports. Stages by number, those of this rank.
  // All outlive the executor.
  Executor(const Schedule& schedule, const std::vector<RankProgram>& programs,
           Communicator& communicator, std::map<int, Stage*> stages,
           ExecutorOptions options = {});

  // All micro-batches. Adds to `grads`.
  absl::Status step(ParameterGradients& grads);
  const ExecutorCounters& counters() const { return counters_; }
  // Adds to them when the step's passes ran, for which it waits.
  const ExecutorCounters& times();
  // A line per rank: where it is, and whether it waits.
  std::string positions() const;

 private:
  using Key = std::pair<int, int>;              // stage, micro-batch
  using ValueKey = std::tuple<bool, int, int>;  // output, stage, micro-batch
  using Ticket = Communicator::Ticket;
  // A micro-batch of a stage between F and its last pass.
  struct Kept {
    explicit Kept(std::string name) : tape(std::move(name)) {}
    Tape tape;
    std::vector<Tensor> outputs;  // of floats: positions without bytes
    Tensor loss;
    bool parked = false;  // recomputed or offloaded
  };

  // A pass between two marks of the device's stream, and what it waited for.
  struct Ran {
    int stage;
    PassKind kind;
    size_t begin, end;
    std::vector<Travel> travels;
  };

  absl::Status run(ParameterGradients& grads);
  absl::Status execute(const Instruction& i, ParameterGradients& grads);
  absl::Status ask(const Instruction& i);
  absl::Status take(const Instruction& i);
  absl::Status send(const Instruction& i);
  absl::Status run_forward(const Pass& pass);
  absl::Status run_backward(const Pass& pass, ParameterGradients& grads);
  absl::Status offer(const Instruction& i, ParameterGradients& grads);
  absl::Status collect(const Instruction& i, ParameterGradients& grads);
  absl::StatusOr<std::vector<Tensor>> wait(Ticket ticket);
  void await_inputs(const Pass& pass);
  void retire_sends();
  void note_kept(int more);
  void clear();
  std::vector<TensorSpec> specs(const Value& value, int stage,
                                int micro_batch) const;

  const Schedule& s_;
  const std::vector<RankProgram>& programs_;
  Communicator& communicator_;
  const std::map<int, Stage*> stages_;
  const ExecutorOptions options_;
  std::map<Key, std::unique_ptr<Kept>> kept_;
  std::map<ValueKey, std::vector<Tensor>> values_;
  std::map<ValueKey, Ticket> asked_;
  std::vector<Ticket> sending_;
  std::map<std::pair<int, int>, Ticket> collecting_;  // by group and rank
  size_t at_ = 0;                                     // instruction
  int64_t live_ = 0;
  DeviceMarks marks_;
  size_t begun_ = 0;
  std::vector<Travel> arriving_;  // of what the next pass has taken
  std::vector<Ran> ran_;
  ExecutorCounters counters_;
};

}  // namespace tapeline
