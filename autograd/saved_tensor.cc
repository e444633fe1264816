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

void SavedTensor::save(const Tensor& tensor) {
  CHECK(!kept_ && hooks_ == 0) << "a saved tensor is saved once";
  if (!tensor) return;
  kept_ = tensor.detach();
  internal::count_saved(kept_.bytes());
  for (size_t i = hook_stack.size(); i-- > 0;) {
    if (!kept_) break;
    CHECK_LT(hooks_, kMaxHooks) << "too many nested saved-tensor hooks";
    internal::retain_hooks(hook_stack[i]);
    SavedTensorHooks* hooks = hook_stack[i].get();
    entries_[hooks_] = {hooks, hooks->pack(kept_)};
    ++hooks_;
  }
  if (kept_) version_ = kept_.storage()->version();
}

Tensor SavedTensor::unpack() const {
  if (kept_) {
    CHECK_EQ(kept_.storage()->version(), version_)
        << "a tensor saved for backward was written in place: " << kept_
        << "; ";
  }
  if (hooks_ == 0) return kept_;
  Tensor tensor = kept_;
  for (int i = hooks_; i-- > 0;) {
    tensor = entries_[i].hooks->unpack(entries_[i].handle, tensor);
  }
  return tensor;
}

void SavedTensor::reset() {
  for (int i = hooks_; i-- > 0;) entries_[i].hooks->drop(entries_[i].handle);
  hooks_ = 0;
  kept_ = Tensor();
}

}  // namespace tapeline
