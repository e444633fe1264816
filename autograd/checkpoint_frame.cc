#include "autograd/checkpoint_frame.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/check.h"

namespace tapeline::internal {
namespace {

thread_local FrameScope* running = nullptr;

std::string where() {
  return "[checkpoint] replay of layer '" + layer_path(layer_scope()) +
         "' differs: ";
}

}  // namespace

int TouchedIndex::find(const std::vector<TouchedTensor>& list,
                       const Tensor& x) const {
  if (map_.empty()) {
    for (size_t i = 0; i < list.size(); ++i) {
      if (list[i].is(x)) return static_cast<int>(i);
    }
    return -1;
  }
  const auto found = map_.find({x.tape, x.slot});
  return found == map_.end() ? -1 : found->second;
}
void TouchedIndex::added(const std::vector<TouchedTensor>& list) {
  constexpr size_t kLong = 16;
  if (list.size() < kLong) return;
  for (size_t i = map_.size(); i < list.size(); ++i) {
    map_[{list[i].tape, list[i].slot}] = static_cast<int>(i);
  }
}

FrameScope::FrameScope(CheckpointFrame& frame, Phase phase, bool shadow,
                       const void* tape)
    : frame_(frame),
      phase_(phase),
      first_(!frame.complete),
      shadow_(shadow),
      tape_(tape),
      made_before_(Storage::next_id()),
      outer_(std::exchange(running, this)) {
  if (first_) {
    // A first run that did not end (an exception) leaves nothing.
    std::vector<std::string> keep = std::move(frame_.keep);
    frame_ = {};
    frame_.keep = std::move(keep);
    // Its replays may come when what is around it is over.
    if (outer_ != nullptr) frame_.keep_all = outer_->keep_all_;
  }
  keep_all_ = frame_.keep_all;
}
FrameScope::~FrameScope() { running = outer_; }

FrameScope* FrameScope::current() { return running; }

std::shared_ptr<void> FrameScope::next_stash(const std::type_info& type) {
  if (first_) return nullptr;
  CHECK(stash_ < frame_.stash.size() && *frame_.stash[stash_].type == type)
      << where() << "stash number " << stash_ << " of " << frame_.stash.size()
      << " is missing or of another type";
  for (const auto& [tensor, version] : frame_.stash[stash_].versions) {
    CHECK_EQ(tensor.storage()->version(), version)
        << where() << "a stashed tensor was written in place: " << tensor
        << "; ";
  }
  return frame_.stash[stash_++].value;
}

void CheckpointFrame::save_kept() {
  for (Kept& k : kept) {
    if (k.saved != nullptr) continue;
    k.saved = std::make_unique<SavedTensor[]>(k.values.size());
    for (size_t i = 0; i < k.values.size(); ++i) {
      CHECK_EQ(k.values[i].storage()->version(), k.versions[i])
          << "[checkpoint] layer '" << layer_path(layer_scope())
          << "' writes the kept output of " << k.op << ": " << k.values[i]
          << "; ";
      k.saved[i].save(std::move(k.values[i]));
    }
  }
  for (const auto& child : children) child->save_kept();
}

bool FrameScope::keeps(const char* op) const {
  return keep_all_ > 0 || std::find(frame_.keep.begin(), frame_.keep.end(),
                                    op) != frame_.keep.end();
}

bool FrameScope::take_kept(const char* op,
                           std::initializer_list<Tensor*> outputs) {
  if (first_ || !keeps(op)) return false;
  CHECK(kept_ < frame_.kept.size() &&
        std::strcmp(frame_.kept[kept_].op, op) == 0)
      << where() << "kept op number " << kept_ << " is " << op << ", it was "
      << (kept_ < frame_.kept.size() ? frame_.kept[kept_].op : "none");
  const CheckpointFrame::Kept& kept = frame_.kept[kept_++];
  size_t i = 0;
  for (Tensor* output : outputs) {
    *output = kept.saved != nullptr ? kept.saved[i].unpack() : kept.values[i];
    ++i;
  }
  return true;
}

void FrameScope::keep_outputs(const char* op,
                              std::initializer_list<Tensor*> outputs) {
  if (!first_ || !keeps(op)) return;
  CheckpointFrame::Kept kept{op, {}, {}, nullptr};
  for (const Tensor* output : outputs) {
    kept.values.push_back(output->detach());
    kept.versions.push_back(output->storage()->version());
  }
  frame_.kept.push_back(std::move(kept));
}

std::shared_ptr<CheckpointFrame> FrameScope::next_child() {
  if (first_) {
    return frame_.children.emplace_back(std::make_shared<CheckpointFrame>());
  }
  CHECK(child_ < frame_.children.size())
      << where() << "more checkpoints inside than the first time";
  return frame_.children[child_++];
}

void FrameScope::check_complete() const {
  if (first_) {
    frame_.complete = true;
    return;
  }
  CHECK(stash_ == frame_.stash.size() && kept_ == frame_.kept.size() &&
        child_ == frame_.children.size())
      << where() << stash_ << " of " << frame_.stash.size()
      << " stashed values, " << kept_ << " of " << frame_.kept.size()
      << " kept ops and " << child_ << " of " << frame_.children.size()
      << " checkpoints inside were used";
  CHECK_EQ(op_, frame_.ops.size())
      << where() << "op number " << op_ << " would be "
      << frame_.ops[std::min(op_, frame_.ops.size() - 1)] << "; ";
}

std::vector<TouchedTensor> FrameScope::take_touched(TouchedIndex& index) {
  index = std::move(index_);
  return std::move(touched_);
}

void FrameScope::note_op(const char* name) {
  if (std::strcmp(name, "observe") == 0) return;  // whoever looks
  if (first_) {
    frame_.ops.push_back(name);
    return;
  }
  CHECK(op_ < frame_.ops.size() && std::strcmp(frame_.ops[op_], name) == 0)
      << where() << "op number " << op_ << " is " << name << ", it was "
      << (op_ < frame_.ops.size() ? frame_.ops[op_] : "none");
  ++op_;
}

void FrameScope::note_input(const Tensor& x) {
  if (!x) return;
  if (!x.requires_grad) {
    if (x.storage()->id() >= made_before_) return;
    for (const auto& [known, version] : constants_) {
      if (known.storage()->id() == x.storage()->id()) return;
    }
    constants_.emplace_back(x, x.storage()->version());
    return;
  }
  if (x.tape == 0) return;  // made by this run
  for (FrameScope* scope = this; scope != nullptr && scope->shadow_;
       scope = scope->outer_) {
    if (scope->index_.find(scope->touched_, x) >= 0) continue;
    scope->touched_.push_back(
        {x.detach(), x.tape, x.slot, x.storage()->version(), -1});
    scope->index_.added(scope->touched_);
  }
}

void FrameScope::note_parameter(const Parameter& parameter) {
  if (known_parameters_.insert(parameter.key()).second) {
    parameters_.emplace_back(parameter);
  }
}

FrameSuspended::FrameSuspended()
    : suspended_(std::exchange(running, nullptr)) {}
FrameSuspended::~FrameSuspended() {
  running = static_cast<FrameScope*>(suspended_);
}

}  // namespace tapeline::internal
