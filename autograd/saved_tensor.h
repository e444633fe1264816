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
// Scopes of hooks end in the reverse of the order in which they began.
// Hooks live as long as the tape that saved through them, also when their scope
// has ended. A saved tensor does not outlive its tape. One thread per tape.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "autograd/mode.h"
#include "runtime/tensor.h"

namespace tapeline {

struct SavedHandle {
  uint64_t words[2] = {0, 0};
};

class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;
  // For Tape::print.
  virtual const char* name() const { return "hooks"; }
  // `kept` is detached; replace or reset it at will. A handle that begins with
  // 0 says that it was left as it is.
  virtual SavedHandle pack(Tensor& kept) = 0;
  // `kept` is what pack() left; returns what pack() was given.
  virtual Tensor unpack(SavedHandle handle, const Tensor& kept) = 0;
  virtual void drop(SavedHandle) {}
};

// Adds hooks inside the current ones until destroyed.
class HookScope : internal::Scoped<const HookScope*> {
 public:
  explicit HookScope(std::shared_ptr<SavedTensorHooks> hooks);
  // The innermost one of this thread, and the one around it; null: none.
  static const HookScope* current() { return current_; }
  const HookScope* outer() const { return before(); }
  const std::shared_ptr<SavedTensorHooks>& hooks() const { return hooks_; }

 private:
  static inline constinit thread_local const HookScope* current_ = nullptr;
  const std::shared_ptr<SavedTensorHooks> hooks_;
};

// Hooks in force on this thread.
int hook_depth();

// Stops the program if `x` is not of that version; `what` says what it is.
void check_unwritten(const Tensor& x, uint32_t version, const char* op,
                     const char* what, uint32_t scope);

// One hook's part in packing a tensor. Lies in the tape's memory.
struct PackedBy {
  SavedTensorHooks* hooks;
  SavedHandle handle;
  const PackedBy* inner;    // which packed it before
  const PackedBy* earlier;  // for the same node
};

// How a tensor that lies elsewhere was packed.
class Packing {
 public:
  Packing() = default;
  ~Packing() {
    if (outermost_ != nullptr) drop();
  }
  Packing(const Packing&) = delete;
  Packing& operator=(const Packing&) = delete;

  // Call at most once, from within an op being recorded. Undefined tensors are
  // left as such.
  void pack(Tensor& kept);
  // `kept` is what pack() left.
  Tensor unpack(const Tensor& kept) const;
  void drop();
  bool packed() const { return op_ != nullptr; }

 private:
  const PackedBy* outermost_ = nullptr;
  const char* op_ = nullptr;
  uint32_t scope_ = 0, version_ = 0;
};

class SavedTensor {
 public:
  void save(Tensor tensor) {
    kept_ = std::move(tensor);
    packing_.pack(kept_);
  }
  Tensor unpack() const { return packing_.unpack(kept_); }
  void reset() {
    packing_.drop();
    kept_ = Tensor();
  }
  explicit operator bool() const { return packing_.packed(); }

 private:
  Tensor kept_;
  Packing packing_;
};

}  // namespace tapeline
