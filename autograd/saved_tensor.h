// SavedTensor: what a node keeps for its backward, through hooks.
//
// save() packs: every hook of the current stack, innermost first, may replace
// what is kept (move it, compress it) and remembers it in a 16-byte handle; the
// outer hook sees what the inner one left. unpack() goes the other way and may
// be called any number of times. A hook that takes the tensor away entirely
// leaves it undefined, and hooks further out are not asked. The destructor
// drops, so what hooks hold is returned even if backward never runs.
// What is kept must not be written in between: unpack() checks the storage's
// version, with and without hooks, and names the op and the tensor.
// Hooks live as long as the tape that saved through them, also when their scope
// has ended. A saved tensor does not outlive its tape. One thread per tape.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "runtime/tensor.h"

namespace tapeline {

struct SavedHandle {
  uint64_t words[2] = {0, 0};
};

class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;
  // `kept` is detached; replace or reset it at will.
  virtual SavedHandle pack(Tensor& kept) = 0;
  // `kept` is what pack() left; returns what pack() was given.
  virtual Tensor unpack(SavedHandle handle, const Tensor& kept) = 0;
  virtual void drop(SavedHandle) {}
};

// Adds hooks inside the current ones until destroyed.
class HookScope {
 public:
  explicit HookScope(std::shared_ptr<SavedTensorHooks> hooks);
  ~HookScope();
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;
};

// Hooks in force on this thread.
int hook_depth();

// A tensor whose bytes nobody may write meanwhile.
struct Watched {
  Watched() = default;
  explicit Watched(Tensor x)
      : tensor(std::move(x)), version(tensor.storage()->version()) {}
  // CHECKs that nobody did; the message says what it is and who uses it.
  const Tensor& value(const char* op, const char* what, uint32_t scope) const;

  Tensor tensor;
  uint32_t version = 0;
};

class SavedTensor {
 public:
  SavedTensor() = default;
  ~SavedTensor() {
    if (!entries_.empty()) reset();
  }
  SavedTensor(const SavedTensor&) = delete;
  SavedTensor& operator=(const SavedTensor&) = delete;

  // Call at most once, from within an op being recorded. Undefined tensors are
  // kept as such.
  void save(Tensor tensor);
  Tensor unpack() const;
  void reset();
  explicit operator bool() const { return kept_.tensor || !entries_.empty(); }

 private:
  struct Entry {
    SavedTensorHooks* hooks;
    SavedHandle handle;
  };
  Watched kept_;
  std::span<Entry> entries_;  // innermost first; the tape's memory
  const char* op_ = "";
  uint32_t scope_ = 0;
};

}  // namespace tapeline
