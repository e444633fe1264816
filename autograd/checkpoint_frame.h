// What a checkpoint keeps between its first run and its replays, for the files
// of this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "autograd/checkpoint.h"
#include "autograd/mode.h"
#include "autograd/tape.h"
#include "runtime/parameter.h"
#include "runtime/tensor.h"

namespace tapeline::internal {

// A tensor that nobody may write before a replay.
struct Watched {
  explicit Watched(const Tensor& x)
      : tensor(x.detach()), version(x.storage()->version()) {}
  Tensor tensor;
  uint32_t version;

  // CHECKs that nobody did; `what` it is begins the message.
  const Tensor& value(const char* what) const;
};

// Of one call of one checkpoint. Read by index: a retained tape replays it
// again.
struct CheckpointFrame {
  struct Stashed {
    std::shared_ptr<void> value;
    const std::type_info* type;
    std::vector<Watched> tensors;
  };
  // Outputs of an op, until the checkpoint's node saves them.
  struct Kept {
    const char* op;
    std::vector<Watched> outputs;
    std::unique_ptr<SavedTensor[]> saved;
  };
  std::vector<Stashed> stash;
  std::vector<Kept> kept;
  std::vector<std::shared_ptr<CheckpointFrame>> children;  // nested, in order
  std::vector<const char*> ops;   // names, in order: replays run the same
  std::vector<std::string> keep;  // ops that are kept, and whether all are
  bool keep_all = false;
  bool complete = false;  // the first run is over

  // By the node being recorded, through the hooks in force.
  void save_kept();
};

// A differentiable tensor of a tape that a first run used: an edge of the
// checkpoint's node.
struct Touched {
  TapePosition at;
  int leaf;                             // the input that it is, or
  std::unique_ptr<Watched> captured{};  // its value
};

// A run of a checkpointed function on this thread: a replay, which records on
// `tape`, or one in Shadow mode, which notes what it touches. `inputs` of a
// Shadow run outlive it; null: a replay.
class FrameScope {
 public:
  FrameScope(CheckpointFrame& frame, Phase phase, const Tape::State* tape,
             const std::vector<Tensor*>* inputs);
  ~FrameScope();
  FrameScope(const FrameScope&) = delete;
  FrameScope& operator=(const FrameScope&) = delete;

  static FrameScope* current();

  Phase phase() const { return phase_; }
  // The next kept value of this run, or null in a first run.
  std::shared_ptr<void> next_stash(const std::type_info& type);
  void keep_stash(CheckpointFrame::Stashed stashed) {
    frame_.stash.push_back(std::move(stashed));
  }
  std::shared_ptr<CheckpointFrame> next_child();
  bool take_kept(const char* op, std::initializer_list<Tensor*> outputs);
  void keep_outputs(const char* op, std::initializer_list<Tensor*> outputs);
  bool keep_all(bool on) { return std::exchange(keep_all_, on); }
  // CHECKs that a replay used everything that was kept, or completes a first
  // run.
  void end();

  // An op that is recorded or would be. In Shadow mode its inputs are noted.
  void note_op(const char* name);
  void note_input(const Tensor& x);
  void note_parameter(const Parameter& parameter);
  // A first run, or a nested one inside a replay: what is recorded under kOn on
  // the tape around it would be recorded twice.
  bool shadows(const Tape::State* tape) const {
    return inputs_ != nullptr && tape == tape_;
  }

  // What a Shadow run used: its node's edges, and what nobody may write.
  std::vector<Touched> touched;
  std::vector<ParameterUse> parameters;
  std::vector<Watched> constants;
  // Which input a tensor of a tape is, and where it stands in `touched`; -1:
  // none, nowhere. A list: it is asked in about the order in which it was made.
  struct Place {
    TapePosition at;
    int leaf = -1, touched = -1;
  };
  std::vector<Place> places;
  Place& place_of(const TapePosition& at);  // made if it is new

 private:
  bool keeps(const char* op) const;

  CheckpointFrame& frame_;
  const Phase phase_;
  const bool first_;
  const Tape::State* const tape_;
  const std::vector<Tensor*>* const inputs_;
  const uint64_t made_before_;  // storages with lower ids
  FrameScope* const outer_;
  size_t stash_ = 0, child_ = 0, op_ = 0, kept_ = 0, place_ = 0;
  TapePosition last_{};  // the greatest of `places`
  bool keep_all_ = false;
};

}  // namespace tapeline::internal
