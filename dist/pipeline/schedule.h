// A pipeline schedule is a value: which passes each rank runs, in which order.
//
// A model is cut into stages; a pass is one stage's work on one micro-batch:
// F forward, I gradient of the inputs, W gradient of the weights, B both. OV is
// a forward and a backward pass of two micro-batches that overlap. Nothing here
// knows of tensors or of channels; what a schedule implies (messages, memory,
// deadlocks) is derived from it by validator.h and simulator.h.
//
// Written as text (text.h), F of stage 2 on micro-batch 0 is 2F0.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tapeline {

enum class PassKind : uint8_t { kForward, kInput, kWeight, kBackward };
char letter(PassKind kind);  // F I W B

struct Pass {
  PassKind kind = PassKind::kForward;
  // Of a forward pass: its activations are made again by I or B, or wait in
  // host memory until then.
  bool recompute = false, offload = false;
  int stage = 0, micro_batch = 0;

  bool is_forward() const { return kind == PassKind::kForward; }
  // I or B: produces the gradient that the stage before waits for.
  bool makes_input_gradient() const {
    return kind == PassKind::kInput || kind == PassKind::kBackward;
  }
  // W or B: frees what the forward pass kept.
  bool makes_weight_gradient() const {
    return kind == PassKind::kWeight || kind == PassKind::kBackward;
  }
  friend bool operator==(const Pass&, const Pass&) = default;
};

// What a pass makes for others, per micro-batch: the output of a stage, or the
// gradient of its inputs.
struct Value {
  bool output = true;
  int stage = 0;
  friend bool operator==(const Value&, const Value&) = default;
};
// What the pass needs besides the weights: F(s) the output of s-1; I(s) and
// B(s) its own output and the gradient of s+1's inputs; W(s) the gradient of
// its own inputs, after which alone it may run.
struct Needs {
  std::array<Value, 2> values;
  size_t count = 0;
  const Value* begin() const { return values.data(); }
  const Value* end() const { return values.data() + count; }
};
Needs needs(const Pass& pass, int stages);

// One pass, or OV(F;B).
class Action {
 public:
  Action(const Pass& pass) : passes_{pass} {}
  Action(const Pass& forward, const Pass& backward)
      : passes_{forward, backward}, overlapped_(true) {}

  bool overlapped() const { return overlapped_; }
  std::span<const Pass> passes() const {
    return {passes_.data(), overlapped_ ? size_t{2} : size_t{1}};
  }
  std::span<Pass> passes() {
    return {passes_.data(), overlapped_ ? size_t{2} : size_t{1}};
  }
  friend bool operator==(const Action&, const Action&) = default;

 private:
  std::array<Pass, 2> passes_;
  bool overlapped_ = false;
};

// Stages that hold the same weights (a tied head, the embedding of prediction
// layers). Each of their ranks enters one reduction, after the last W or B that
// it has for them.
struct ReplicaGroup {
  std::string name;
  std::vector<int> stages;
  friend bool operator==(const ReplicaGroup&, const ReplicaGroup&) = default;
};

struct Schedule {
  int micro_batches = 0;
  std::vector<int> placement;  // stage -> rank
  std::vector<ReplicaGroup> groups;
  std::vector<std::vector<Action>> ranks;  // in program order

  int stages() const { return static_cast<int>(placement.size()); }
  // Stages of the rank that has most of them.
  int chunks() const;
  friend bool operator==(const Schedule&, const Schedule&) = default;
};

// When the results of OV leave, and its inputs are needed: both at once, or
// half by half, F first, as when it is run as F, then B.
enum class OvRelease { kEnd, kEarly };

inline Pass forward(int stage, int micro_batch) {
  return {.stage = stage, .micro_batch = micro_batch};
}
inline Pass pass(PassKind kind, int stage, int micro_batch) {
  return {.kind = kind, .stage = stage, .micro_batch = micro_batch};
}

// Stage s on rank s mod ranks.
std::vector<int> loop_placement(int ranks, int chunks);
// Two stages a rank, down and back up: the first and last are neighbours.
std::vector<int> v_placement(int ranks);

// 2F0, 2F0r recomputed, 2F0o offloaded; OV(0F3;3B1).
std::string to_string(const Pass& pass);
std::string to_string(const Action& action);

}  // namespace tapeline
