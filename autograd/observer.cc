#include "autograd/observer.h"

#include "autograd/checkpoint.h"
#include "autograd/tape.h"
#include "runtime/check.h"

namespace tapeline {
namespace {

thread_local Observer* current = nullptr;

struct ObserveNode : Node {
  Observer* seen_by = nullptr;

  void backward_inputs(Backward& b) override {
    seen_by->gradient(value_name, layer_path(scope), b.grad());
    b.add(0, b.grad());
  }
  const char* value_name = "";
};

}  // namespace

ObserverScope::ObserverScope(Observer& observer)
    : current_(current, &observer) {}

Observer* observer() { return current; }

Tensor observe(const char* name, const Tensor& x) {
  if (current == nullptr) return x;
  current->value(name, layer_path(layer_scope()), x.detach());
  Tensor y = x.detach();
  if (auto* n = push<ObserveNode>(internal::kObserveOp, {&x}, {&y})) {
    n->seen_by = current;
    n->value_name = name;
  }
  return y;
}

Tensor observe_choice(const char* name, const Tensor& ids) {
  if (current == nullptr) return ids;
  Tensor chosen = current->choice(name, layer_path(layer_scope()), ids);
  CHECK(chosen.shape() == ids.shape() && chosen.dtype() == ids.dtype())
      << "[observe_choice] " << name << " is " << ids << ", the observer gave "
      << chosen;
  return chosen;
}

}  // namespace tapeline
