#include "autograd/dropped_outputs.h"

#include <atomic>
#include <memory>

#include "autograd/checkpoint.h"
#include "autograd/tape_state.h"

namespace tapeline {
namespace {

std::atomic<int64_t> refill_count{0};

}  // namespace

int64_t refills() { return refill_count.load(); }

DroppedOutputs::DroppedOutputs(bool on)
    : on_(on && grad_mode() == GradMode::kOn &&
          internal::current_tape() != nullptr && phase() == Phase::kOriginal) {}

DroppedOutputs::~DroppedOutputs() {
  for (Output& output : outputs_) {
    // Nobody saved what only this scope still holds.
    if (output.storage.use_count() == 1) continue;
    output.storage->drop(std::move(output.refill));
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
                        const internal::FrameSuspended alone;
                        const Tensor x = saved->unpack();
                        CHECK(x) << "a dropped output is read after its tape "
                                 << "is gone";
                        ++refill_count;
                        return fn(x).storage();
                      }});
}

}  // namespace tapeline
