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

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "autograd/checkpoint.h"
#include "autograd/mode.h"
#include "autograd/tape.h"
#include "runtime/parameter.h"
#include "runtime/tensor.h"

namespace tapeline::internal {

// Of one call of one checkpoint. Read by index: a retained tape replays it
// again.
struct CheckpointFrame {
  struct Stashed {
    std::shared_ptr<void> value;
    const std::type_info* type;
    std::vector<std::pair<Tensor, uint32_t>> versions;
  };
  // Outputs of an op: values, with their versions then, until the checkpoint's
  // node saves them.
  struct Kept {
    const char* op;
    std::vector<Tensor> values;
    std::vector<uint32_t> versions;
    std::unique_ptr<SavedTensor[]> saved;
  };
  std::vector<Stashed> stash;
  std::vector<Kept> kept;
  std::vector<std::string> keep;  // names of ops
  int keep_all = 0;  // regions around the call whose ops are all kept
  std::vector<std::shared_ptr<CheckpointFrame>> children;  // nested, in order
  std::vector<const char*> ops;  // names, in order: replays run the same
  bool complete = false;         // the first run is over

  // By the node being recorded, through the hooks in force.
  void save_kept();
};

// A differentiable tensor of a tape that a Shadow run used: an edge of the
// checkpoint's node.
struct TouchedTensor {
  Tensor value;
  uint64_t tape = 0;
  uint32_t slot = 0;
  uint32_t version = 0;
  int leaf = -1;  // explicit input whose saved tensor holds the value

  bool is(const Tensor& x) const { return x.tape == tape && x.slot == slot; }
};

// Where a (tape, slot) stands in a list of touched tensors; -1: nowhere. A map
// once a list is long.
class TouchedIndex {
 public:
  int find(const std::vector<TouchedTensor>& list, const Tensor& x) const;
  void added(const std::vector<TouchedTensor>& list);

 private:
  absl::flat_hash_map<std::pair<uint64_t, uint32_t>, int> map_;
};

// A run of a checkpointed function on this thread.
class FrameScope {
 public:
  // `tape` is the current one; `shadow`: this run notes what it touches.
  FrameScope(CheckpointFrame& frame, Phase phase, bool shadow,
             const void* tape);
  ~FrameScope();
  FrameScope(const FrameScope&) = delete;
  FrameScope& operator=(const FrameScope&) = delete;

  static FrameScope* current();

  Phase phase() const { return phase_; }
  CheckpointFrame& frame() { return frame_; }
  // The next kept value of this run, or null in a first run.
  std::shared_ptr<void> next_stash(const std::type_info& type);
  std::shared_ptr<CheckpointFrame> next_child();
  bool take_kept(const char* op, std::initializer_list<Tensor*> outputs);
  void keep_outputs(const char* op, std::initializer_list<Tensor*> outputs);
  void keep_all(int change) { keep_all_ += change; }
  // CHECKs that a replay used everything that was kept, or completes a first
  // run.
  void check_complete() const;
  std::vector<TouchedTensor> take_touched(TouchedIndex& index);

  // An op that is recorded or would be. In Shadow mode its inputs are noted.
  void note_op(const char* name);
  void note_input(const Tensor& x);
  void note_parameter(const Parameter& parameter);
  // A first run, or a nested one inside a replay: what is recorded under kOn on
  // the tape around it would be recorded twice.
  bool shadows(const void* tape) const { return shadow_ && tape == tape_; }
  // What the run used and nobody may write before its replay.
  std::vector<ParameterUse> take_parameters() { return std::move(parameters_); }
  std::vector<std::pair<Tensor, uint32_t>> take_constants() {
    return std::move(constants_);
  }

 private:
  bool keeps(const char* op) const;

  CheckpointFrame& frame_;
  const Phase phase_;
  const bool first_, shadow_;
  const void* const tape_;
  const uint64_t made_before_;  // storages with lower ids
  FrameScope* const outer_;
  size_t stash_ = 0, child_ = 0, op_ = 0, kept_ = 0;
  int keep_all_ = 0;
  std::vector<TouchedTensor> touched_;
  TouchedIndex index_;
  std::vector<ParameterUse> parameters_;
  absl::flat_hash_set<const Parameter::State*> known_parameters_;
  std::vector<std::pair<Tensor, uint32_t>> constants_;
};

}  // namespace tapeline::internal
