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

class SavedTensor {
 public:
  SavedTensor() = default;
  ~SavedTensor() { drop(); }
  SavedTensor(const SavedTensor&) = delete;
  SavedTensor& operator=(const SavedTensor&) = delete;
  SavedTensor(SavedTensor&& other) noexcept
      : kept_(std::move(other.kept_)),
        entries_(other.entries_),
        hooks_(std::exchange(other.hooks_, 0)),
        version_(other.version_),
        op_(other.op_),
        scope_(other.scope_) {}

  // Call at most once, from within an op being recorded. Undefined tensors are
  // kept as such.
  void save(Tensor tensor);
  Tensor unpack() const;
  void reset();
  explicit operator bool() const {
    return static_cast<bool>(kept_) || hooks_ > 0;
  }

 private:
  void drop();

  struct Entry {
    SavedTensorHooks* hooks;
    SavedHandle handle;
  };
  Tensor kept_;
  Entry* entries_ = nullptr;  // innermost first; the tape's memory
  int32_t hooks_ = 0;
  uint32_t version_ = 0;
  const char* op_ = "";
  uint32_t scope_ = 0;
};

}  // namespace tapeline
