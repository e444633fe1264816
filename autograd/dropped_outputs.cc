#include "autograd/dropped_outputs.h"

#include <atomic>
#include <memory>

#include "autograd/checkpoint.h"
#include "autograd/tape.h"

namespace tapeline {
namespace {

std::atomic<int64_t> refill_count{0};

}  // namespace

int64_t refills() { return refill_count.load(); }

DroppedOutputs::DroppedOutputs(bool on)
    : on_(on && internal::records_original()) {}

DroppedOutputs::~DroppedOutputs() {
  for (auto& [storage, refill] : outputs_) {
    // Nobody saved what only this scope still holds.
    if (storage.use_count() > 1) storage->drop(std::move(refill));
  }
}

void DroppedOutputs::add(Function fn, const Tensor& x, const Tensor& y) {
  if (!on_ || y.tape == 0 || y.bytes() == 0) return;
  CHECK(y.offset() == 0 && y.contiguous() && !(y.storage() == x.storage()))
      << "only an output of its own is dropped, not " << y;
  auto saved = std::make_shared<SavedTensor>();
  saved->save(x);
  internal::current_tape()->unowned.push_back(saved);
  outputs_.push_back({y.storage(), [fn = std::move(fn), saved] {
                        const GradModeScope off(GradMode::kOff);
                        const internal::Scoped alone(internal::running, {});
                        const internal::Scoped again(internal::refilling, true);
                        const Tensor x = saved->unpack();
                        CHECK(x) << "a dropped output is read after its tape "
                                 << "is gone";
                        ++refill_count;
                        return fn(x).storage();
                      }});
}

}  // namespace tapeline
