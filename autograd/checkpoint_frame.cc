#include "autograd/checkpoint_frame.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/check.h"

namespace tapeline::internal {
namespace {

thread_local FrameScope* running = nullptr;

std::string differs() {
  return "[checkpoint] replay of layer '" + layer_path(layer_scope()) +
         "' differs: ";
}

}  // namespace

const Tensor& Watched::value(const char* what) const {
  CHECK_EQ(tensor.storage()->version(), version)
      << "[checkpoint] layer '" << layer_path(layer_scope()) << "': " << what
      << " was written in place: " << tensor << "; ";
  return tensor;
}

void CheckpointFrame::save_kept() {
  for (Kept& k : kept) {
    if (k.saved != nullptr) continue;
    k.saved = std::make_unique<SavedTensor[]>(k.outputs.size());
    for (size_t i = 0; i < k.outputs.size(); ++i) {
      k.saved[i].save(k.outputs[i].value("a kept output"));
    }
    k.outputs.clear();
  }
  for (const auto& child : children) child->save_kept();
}

FrameScope::FrameScope(CheckpointFrame& frame, Phase phase,
                       const Tape::State* tape,
                       const std::vector<Tensor*>* inputs)
    : frame_(frame),
      phase_(phase),
      first_(!frame.complete),
      tape_(tape),
      inputs_(inputs),
      made_before_(Storage::next_id()),
      outer_(std::exchange(running, this)) {
  if (first_ && outer_ != nullptr) frame_.keep_all = outer_->keep_all_;
  // A replay may come when what is around the call is over.
  keep_all_ = frame_.keep_all;
  if (inputs == nullptr) return;
  places.reserve(inputs->size());
  touched.reserve(inputs->size());
  for (size_t i = 0; i < inputs->size(); ++i) {
    const Tensor& x = *(*inputs)[i];
    if (!x || !x.requires_grad || x.tape == 0) continue;
    Place& place = place_of(position(x));
    if (place.leaf < 0) place.leaf = static_cast<int>(i);
  }
}
FrameScope::~FrameScope() { running = outer_; }

FrameScope* FrameScope::current() { return running; }

std::shared_ptr<void> FrameScope::next_stash(const std::type_info& type) {
  if (first_) return nullptr;
  CHECK(stash_ < frame_.stash.size() && *frame_.stash[stash_].type == type)
      << differs() << "stash number " << stash_ << " of " << frame_.stash.size()
      << " is missing or of another type";
  for (const Watched& x : frame_.stash[stash_].tensors) {
    x.value("a stashed tensor");
  }
  return frame_.stash[stash_++].value;
}

std::shared_ptr<CheckpointFrame> FrameScope::next_child() {
  if (first_) {
    return frame_.children.emplace_back(std::make_shared<CheckpointFrame>());
  }
  CHECK(child_ < frame_.children.size())
      << differs() << "more checkpoints inside than the first time";
  return frame_.children[child_++];
}

bool FrameScope::keeps(const char* op) const {
  return keep_all_ || std::find(frame_.keep.begin(), frame_.keep.end(), op) !=
                          frame_.keep.end();
}

bool FrameScope::take_kept(const char* op,
                           std::initializer_list<Tensor*> outputs) {
  if (first_ || !keeps(op)) return false;
  const char* then =
      kept_ < frame_.kept.size() ? frame_.kept[kept_].op : "none";
  CHECK(std::strcmp(then, op) == 0) << differs() << "kept op number " << kept_
                                    << " is " << op << ", it was " << then;
  const CheckpointFrame::Kept& kept = frame_.kept[kept_++];
  size_t i = 0;
  for (Tensor* output : outputs) {
    *output = kept.saved != nullptr ? kept.saved[i].unpack()
                                    : kept.outputs[i].value("a kept output");
    ++i;
  }
  return true;
}

void FrameScope::keep_outputs(const char* op,
                              std::initializer_list<Tensor*> outputs) {
  if (!first_ || !keeps(op)) return;
  frame_.kept.push_back({op, {}, nullptr});
  for (const Tensor* x : outputs) frame_.kept.back().outputs.emplace_back(*x);
}

void FrameScope::end() {
  running = outer_;
  if (first_) {
    frame_.complete = true;
    return;
  }
  CHECK(stash_ == frame_.stash.size() && kept_ == frame_.kept.size() &&
        child_ == frame_.children.size())
      << differs() << stash_ << " of " << frame_.stash.size()
      << " stashed values, " << kept_ << " of " << frame_.kept.size()
      << " kept ops and " << child_ << " of " << frame_.children.size()
      << " checkpoints inside were used";
  CHECK_EQ(op_, frame_.ops.size())
      << differs() << "op number " << op_ << " would be "
      << frame_.ops[std::min(op_, frame_.ops.size() - 1)] << "; ";
}

void FrameScope::note_op(const char* name) {
  if (std::strcmp(name, "observe") == 0) return;  // whoever looks
  if (first_) {
    frame_.ops.push_back(name);
    return;
  }
  const char* then = op_ < frame_.ops.size() ? frame_.ops[op_] : "none";
  CHECK(std::strcmp(then, name) == 0) << differs() << "op number " << op_
                                      << " is " << name << ", it was " << then;
  ++op_;
}

void FrameScope::note_input(const Tensor& x) {
  if (!x) return;
  if (!x.requires_grad) {
    const auto same = [&](const Tensor& y) {
      return y && y.storage() == x.storage();
    };
    if (x.storage()->id() >= made_before_ ||
        std::any_of(constants.begin(), constants.end(),
                    [&](const Watched& w) { return same(w.tensor); }) ||
        // Inputs are watched by their saved tensors.
        (inputs_ != nullptr &&
         std::any_of(inputs_->begin(), inputs_->end(),
                     [&](const Tensor* input) { return same(*input); }))) {
      return;
    }
    constants.emplace_back(x);
    return;
  }
  if (x.tape == 0) return;  // made by this run
  for (FrameScope* scope = this; scope != nullptr && scope->inputs_ != nullptr;
       scope = scope->outer_) {
    Place& place = scope->place_of(position(x));
    if (place.touched >= 0) continue;
    place.touched = static_cast<int>(scope->touched.size());
    scope->touched.push_back({position(x), place.leaf, nullptr});
    if (place.leaf < 0) {
      scope->touched.back().captured = std::make_unique<Watched>(x);
    }
  }
}

FrameScope::Place& FrameScope::place_of(const TapePosition& at) {
  if (places.empty() || at > last_) {  // made later than all that are known
    last_ = at;
    place_ = places.size();
    return places.emplace_back(Place{at});
  }
  for (size_t n = places.size(); n > 0; --n) {
    if (++place_ >= places.size()) place_ = 0;
    if (places[place_].at == at) return places[place_];
  }
  place_ = places.size();
  return places.emplace_back(Place{at});
}

void FrameScope::note_parameter(const Parameter& parameter) {
  for (const ParameterUse& use : parameters) {
    if (use.parameter().key() == parameter.key()) return;
  }
  parameters.emplace_back(parameter);
}

FrameSuspended::FrameSuspended()
    : suspended_(std::exchange(running, nullptr)) {}
FrameSuspended::~FrameSuspended() {
  running = static_cast<FrameScope*>(suspended_);
}

}  // namespace tapeline::internal
