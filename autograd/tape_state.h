// The inside of a Tape, for the files of this folder.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "autograd/tape.h"

namespace tapeline {

struct Tape::State {
  std::string name;
  uint64_t id = 0;
  std::vector<std::unique_ptr<std::byte[]>> chunks;  // nodes live in here
  size_t used = 0;                                   // of the last chunk
  std::vector<Node*> nodes;                          // null once freed
  uint32_t next_slot = 1;
  std::vector<uint32_t> input_slots;
  std::vector<Tensor> slots;  // gradients, while a backward runs
  // Output gradients that W parts still need, per node (backward_inputs only).
  std::vector<std::vector<Tensor>> weight_stash;
  std::vector<std::shared_ptr<SavedTensorHooks>> hooks;
  // Saved tensors that no node owns; they end with the tape at the latest.
  std::vector<std::weak_ptr<SavedTensor>> unowned;
  // Nodes not freed yet. Written by the tape's thread alone, so without the
  // price of a shared counter.
  std::atomic<int64_t> live{0};
  // Of a replay's tape: inputs by the (tape, slot) they have outside.
  absl::flat_hash_map<TapePosition, uint32_t> captures;
  bool consumed = false, running = false;

  ~State();
  // Memory for the tape's lifetime, aligned to 16.
  std::byte* allocate(size_t bytes);
  void free_node(size_t index);
  // Whether a W part waits.
  bool has_weights() const {
    return std::any_of(weight_stash.begin(), weight_stash.end(),
                       [](const auto& grads) { return !grads.empty(); });
  }
  // Keeps hooks alive as long as the tape.
  void retain(const std::shared_ptr<SavedTensorHooks>& hooks);
};

namespace internal {

Tape::State* current_tape();

// Tensor::detach() of a handle in place.
inline void leave_tape(Tensor& x) {
  x.requires_grad = false;
  x.slot = 0;
  x.tape = 0;
}

}  // namespace internal
}  // namespace tapeline
