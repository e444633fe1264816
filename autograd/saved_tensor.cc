#include "autograd/saved_tensor.h"

#include <algorithm>
#include <vector>

#include "autograd/tape.h"

namespace tapeline {
namespace {

thread_local std::vector<std::shared_ptr<SavedTensorHooks>> hook_stack;
const Tensor undefined;  // faster to copy than to make

}  // namespace

HookScope::HookScope(std::shared_ptr<SavedTensorHooks> hooks) {
  CHECK(hooks != nullptr);
  hook_stack.push_back(std::move(hooks));
}
HookScope::~HookScope() { hook_stack.pop_back(); }

int hook_depth() { return static_cast<int>(hook_stack.size()); }

const Tensor& Watched::value(const char* op, const char* what,
                             uint32_t scope) const {
  CHECK(!tensor || tensor.storage()->version() == version)
      << "[" << op << "] " << what << " was written in place: " << tensor
      << ", layer '" << layer_path(scope) << "'; ";
  return tensor;
}

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
  kept_.tensor = std::move(tensor);
  internal::set_position(kept_.tensor, {});
  Entry* entries = nullptr;
  if (!hook_stack.empty()) {
    entries = reinterpret_cast<Entry*>(
        tape->allocate(hook_stack.size() * sizeof(Entry)));
  }
  for (size_t i = hook_stack.size(); i-- > 0 && kept_.tensor;) {
    // The same few hooks come again and again; the newest is the likeliest.
    auto& kept = tape->hooks;
    if (std::find(kept.rbegin(), kept.rend(), hook_stack[i]) == kept.rend()) {
      kept.push_back(hook_stack[i]);
    }
    SavedTensorHooks* hooks = hook_stack[i].get();
    entries[entries_.size()] = {hooks, hooks->pack(kept_.tensor)};
    entries_ = {entries, entries_.size() + 1};
  }
  if (kept_.tensor) kept_.version = kept_.tensor.storage()->version();
}

Tensor SavedTensor::unpack() const {
  const Tensor& kept = kept_.value(op_, "a tensor saved for backward", scope_);
  if (entries_.empty()) return kept;
  size_t i = entries_.size() - 1;
  Tensor tensor = entries_[i].hooks->unpack(entries_[i].handle, kept);
  while (i-- > 0) {
    tensor = entries_[i].hooks->unpack(entries_[i].handle, tensor);
  }
  return tensor;
}

void SavedTensor::reset() {
  for (size_t i = entries_.size(); i-- > 0;) {
    entries_[i].hooks->drop(entries_[i].handle);
  }
  entries_ = {};
  kept_.tensor = undefined;
}

}  // namespace tapeline
