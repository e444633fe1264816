// Observer: sees the named values of a forward pass as they are made, and the
// gradients that come back to them; may put its own discrete choices in place
// of the pass's.
//
// Models and ops name what is worth comparing with another implementation:
// there is no second forward pass that could differ from the one that trains.
// Without an observer a name costs one test of a thread-local pointer and
// records nothing. Names are those of docs/parity.md; the part of the model is
// layer_path(layer_scope()) at the time of the call. Observers are per thread,
// scoped, and outlive the tapes recorded under them.
#pragma once

#include <string>
#include <utility>

#include "autograd/mode.h"
#include "runtime/tensor.h"

namespace tapeline {

class Observer {
 public:
  virtual ~Observer() = default;
  // `x` may be written after the call: keep a clone.
  virtual void value(const char* name, const std::string& path,
                     const Tensor& x) = 0;
  virtual void gradient(const char* name, const std::string& path,
                        const Tensor& dx) = 0;
  // Ids of keys or experts, int32. What it returns is used: `ids`, or other
  // ids of the same shape.
  virtual Tensor choice(const char* name, const std::string& path,
                        const Tensor& ids) = 0;
};

class ObserverScope {
 public:
  explicit ObserverScope(Observer& observer);

 private:
  internal::Scoped<Observer*> current_;
};

// Null without one.
Observer* observer();

// x, or under an observer a handle on it whose gradient is seen too.
Tensor observe(const char* name, const Tensor& x);
Tensor observe_choice(const char* name, const Tensor& ids);

// A value that only an observer wants: `make` runs for it alone, unrecorded.
template <class F>
void observe_with(const char* name, F&& make) {
  if (observer() == nullptr) return;
  const GradModeScope off(GradMode::kOff);
  observer()->value(name, layer_path(layer_scope()), std::forward<F>(make)());
}

}  // namespace tapeline
