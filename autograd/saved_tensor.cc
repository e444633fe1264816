#include "autograd/saved_tensor.h"

#include <algorithm>
#include <new>

#include "autograd/tape.h"

namespace tapeline {

HookScope::HookScope(std::shared_ptr<SavedTensorHooks> hooks)
    : Scoped(current_, this), hooks_(std::move(hooks)) {
  CHECK(hooks_ != nullptr);
}

int hook_depth() {
  int depth = 0;
  for (auto* s = HookScope::current(); s != nullptr; s = s->outer()) ++depth;
  return depth;
}

void check_unwritten(const Tensor& x, uint32_t version, const char* op,
                     const char* what, uint32_t scope) {
  CHECK(!x || x.storage()->version() == version)
      << "[" << op << "] " << what << " was written in place: " << x
      << ", layer '" << layer_path(scope) << "'; ";
}

void Packing::pack(Tensor& kept) {
  CHECK(!packed()) << "a saved tensor is saved once";
  if (!kept) return;
  Tape::State* tape = internal::current_tape();
  CHECK(tape != nullptr && !tape->nodes.empty())
      << "a tensor is saved outside of an op being recorded";
  Node& node = *tape->nodes.back();
  node.saved_bytes += kept.bytes();
  op_ = node.name;
  scope_ = node.scope;
  kept.position() = {};
  for (auto* s = HookScope::current(); s != nullptr && kept; s = s->outer()) {
    SavedTensorHooks* hooks = s->hooks().get();
    tape->keep(s->hooks());
    void* memory = tape->allocate(sizeof(PackedBy));
    outermost_ = node.packed_by = new (memory)
        PackedBy{hooks, hooks->pack(kept), outermost_, node.packed_by};
  }
  if (kept) version_ = kept.storage()->version();
}

Tensor Packing::unpack(const Tensor& kept) const {
  check_unwritten(kept, version_, op_, "a tensor saved for backward", scope_);
  if (outermost_ == nullptr) return kept;
  Tensor tensor = outermost_->hooks->unpack(outermost_->handle, kept);
  for (auto* by = outermost_->inner; by != nullptr; by = by->inner) {
    tensor = by->hooks->unpack(by->handle, tensor);
  }
  return tensor;
}

void Packing::drop() {
  for (; outermost_ != nullptr; outermost_ = outermost_->inner) {
    outermost_->hooks->drop(outermost_->handle);
  }
}

}  // namespace tapeline
