#include "autograd/saved_tensor.h"

#include <utility>
#include <vector>

#include "autograd/tape_state.h"
#include "runtime/check.h"

namespace tapeline {
namespace {

thread_local std::vector<std::shared_ptr<SavedTensorHooks>> hook_stack;

}  // namespace

HookScope::HookScope(std::shared_ptr<SavedTensorHooks> hooks) {
  CHECK(hooks != nullptr);
  hook_stack.push_back(std::move(hooks));
}
HookScope::~HookScope() { hook_stack.pop_back(); }

int hook_depth() { return static_cast<int>(hook_stack.size()); }

void SavedTensor::save(Tensor tensor) {
  CHECK(!*this) << "a saved tensor is saved once";
  if (!tensor) return;
  Tape::State* tape = internal::current_tape();
  CHECK(tape != nullptr && !tape->nodes.empty())
      << "a tensor is saved outside of an op being recorded";
  Node& node = *tape->nodes.back();
  node.saved_bytes += tensor.bytes();
  op_ = node.name;
  scope_ = node.scope;
  internal::leave_tape(tensor);
  kept_ = std::move(tensor);
  if (!hook_stack.empty()) {
    entries_ = reinterpret_cast<Entry*>(
        tape->allocate(hook_stack.size() * sizeof(Entry)));
  }
  for (size_t i = hook_stack.size(); i-- > 0 && kept_;) {
    tape->retain(hook_stack[i]);
    SavedTensorHooks* hooks = hook_stack[i].get();
    entries_[hooks_++] = {hooks, hooks->pack(kept_)};
  }
  if (kept_) version_ = kept_.storage()->version();
}

Tensor SavedTensor::unpack() const {
  if (kept_) {
    CHECK_EQ(kept_.storage()->version(), version_)
        << "[" << op_
        << "] a tensor saved for backward was written in place: " << kept_
        << ", layer '" << layer_path(scope_) << "'; ";
  }
  if (hooks_ == 0) return kept_;
  int32_t i = hooks_ - 1;
  Tensor tensor = entries_[i].hooks->unpack(entries_[i].handle, kept_);
  while (i-- > 0) {
    tensor = entries_[i].hooks->unpack(entries_[i].handle, tensor);
  }
  return tensor;
}

void SavedTensor::drop() {
  for (int32_t i = hooks_; i-- > 0;) {
    entries_[i].hooks->drop(entries_[i].handle);
  }
  hooks_ = 0;
}

void SavedTensor::reset() {
  drop();
  kept_ = Tensor();
}

}  // namespace tapeline
