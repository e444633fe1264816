#include "autograd/checkpoint.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "autograd/checkpoint_frame.h"
#include "autograd/tape.h"
#include "autograd/tape_state.h"

namespace tapeline {

using internal::CheckpointBody;
using internal::CheckpointFrame;
using internal::FrameScope;
using internal::Touched;
using internal::Watched;

namespace {

std::atomic<int64_t> replay_count{0}, stash_read_count{0}, kept_op_count{0};

struct OutputSpec {
  bool defined = false;
  bool requires_grad = false;
  bool passed_on = false;  // a differentiable tensor from outside: no output
  DType dtype = DType::kF32;
  Shape shape;
};

class CheckpointNode : public Node {
 public:
  void backward_inputs(Backward& b) override {
    for (const ParameterUse& use : parameters) use.value();
    for (const Watched& constant : constants) {
      constant.value("a tensor it uses");
    }
    local_ = std::make_unique<Tape>("replay of '" + layer_path(scope) + "'");
    std::vector<Tensor> values;
    for (const SavedTensor& leaf : leaves) values.push_back(leaf.unpack());
    std::vector<Seed> seeds;
    for (size_t e = 0; e < touched.size(); ++e) {
      const Touched& t = touched[e];
      const Tensor local =
          local_->input(t.leaf < 0 ? t.captured->value("a captured tensor")
                                   : values[static_cast<size_t>(t.leaf)]);
      local_->state()->captures[t.at] = local.slot;
      // What arrived from later uses comes first, as without a checkpoint.
      if (Tensor partial = b.take(static_cast<int>(e))) {
        seeds.push_back({local, std::move(partial)});
      }
    }
    // Inputs have the places of the outer tape: ops find their slots through
    // the captures.
    for (const auto& [leaf, at] : places) {
      internal::set_position(values[leaf], at);
    }
    add_seeds(replay(std::move(values)), b, seeds);
    const bool both = b.parts() == Parts::kBoth;
    std::vector<Tensor> gradients =
        both ? local_->backward(seeds, b.parameter_gradients())
             : local_->backward_inputs(seeds, b.parameter_gradients());
    for (size_t e = 0; e < gradients.size(); ++e) {
      if (gradients[e]) b.add(static_cast<int>(e), std::move(gradients[e]));
    }
    // What W still needs is the local tape, if anything.
    if (both || !local_->state()->has_weights()) local_.reset();
    if (b.retained() || both) return;
    leaves.clear();
    touched.clear();
    constants.clear();
    frame.reset();
    body.reset();
  }
  bool has_weights() const override { return local_ != nullptr; }
  void backward_weights(Backward& b) override {
    local_->backward_weights(b.parameter_gradients());
    local_.reset();
  }

  std::unique_ptr<CheckpointBody> body;
  std::shared_ptr<CheckpointFrame> frame;
  int site = use_site();
  std::vector<SavedTensor> leaves;
  // Leaves that require grad, and where they are on the outer tape.
  std::vector<std::pair<size_t, TapePosition>> places;
  std::vector<Touched> touched;  // this node's inputs
  std::vector<ParameterUse> parameters;
  std::vector<Watched> constants;
  std::vector<OutputSpec> specs;

 private:
  std::vector<Tensor> replay(std::vector<Tensor> inputs) {
    const UseSite at_site(site);
    const RecordScope recording(*local_);
    FrameScope running(*frame, Phase::kReplay, local_->state(), nullptr);
    std::vector<Tensor> outputs = body->run(std::move(inputs));
    running.end();
    replay_count.fetch_add(1, std::memory_order_relaxed);
    Device::current().pool().note(MemoryEvent::kReplay, {});
    return outputs;
  }

  void add_seeds(const std::vector<Tensor>& outputs, Backward& b,
                 std::vector<Seed>& seeds) const {
    const std::string differs = "' differs: ";
    CHECK_EQ(outputs.size(), specs.size())
        << "[checkpoint] replay of layer '" << layer_path(scope) << differs
        << "another structure; ";
    int differentiable = 0;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const Tensor& now = outputs[i];
      const OutputSpec& then = specs[i];
      CHECK(static_cast<bool>(now) == then.defined &&
            now.shape() == then.shape && now.dtype() == then.dtype &&
            (then.passed_on || now.requires_grad == then.requires_grad))
          << "[checkpoint] replay of layer '" << layer_path(scope) << differs
          << "output " << i << " is " << now << ", it was " << then.shape << " "
          << name_of(then.dtype) << (then.requires_grad ? " with" : " without")
          << " gradient";
      if (!then.requires_grad || then.passed_on) continue;
      const Tensor& gradient = b.grad(differentiable++);
      if (gradient) seeds.push_back({now, gradient});
    }
  }

  std::unique_ptr<Tape> local_;
};

}  // namespace

Phase phase() {
  const FrameScope* scope = FrameScope::current();
  return scope == nullptr ? Phase::kOriginal : scope->phase();
}

CheckpointCounters checkpoint_counters() {
  return {replay_count.load(), stash_read_count.load(), kept_op_count.load()};
}

namespace internal {

bool records() {
  return grad_mode() == GradMode::kShadow ||
         (grad_mode() == GradMode::kOn && current_tape() != nullptr);
}

bool stashing() { return FrameScope::current() != nullptr; }

std::shared_ptr<void> next_stash(const std::type_info& type) {
  std::shared_ptr<void> kept = FrameScope::current()->next_stash(type);
  if (kept) stash_read_count.fetch_add(1, std::memory_order_relaxed);
  return kept;
}

void keep_stash(std::shared_ptr<void> value, const std::type_info& type,
                const std::vector<Tensor*>& tensors) {
  CheckpointFrame::Stashed stashed{std::move(value), &type, {}};
  for (const Tensor* x : tensors) {
    CHECK(!x->requires_grad) << "[stash] " << *x << " requires a gradient";
    if (*x) stashed.tensors.emplace_back(*x);
  }
  FrameScope::current()->keep_stash(std::move(stashed));
}

bool take_kept(const char* op, std::initializer_list<Tensor*> outputs) {
  FrameScope* frame = FrameScope::current();
  if (frame == nullptr || !frame->take_kept(op, outputs)) return false;
  kept_op_count.fetch_add(1, std::memory_order_relaxed);
  return true;
}

void keep_outputs(const char* op, std::initializer_list<Tensor*> outputs) {
  FrameScope* frame = FrameScope::current();
  if (frame != nullptr) frame->keep_outputs(op, outputs);
}

KeepScope::KeepScope() {
  FrameScope* frame = FrameScope::current();
  if (frame != nullptr) previous_ = frame->keep_all(true);
}
KeepScope::~KeepScope() {
  FrameScope* frame = FrameScope::current();
  if (frame != nullptr) frame->keep_all(previous_);
}

struct FirstRun::State {
  State(const RecomputePolicy& policy, std::unique_ptr<CheckpointBody> made)
      : body(std::move(made)), inputs(body->inputs()), frame(frame_of(policy)) {
    scope.emplace(*frame, phase(), current_tape(), &inputs);
    for (const Tensor* x : inputs) {
      CHECK(!recording || !x->requires_grad || x->tape != 0)
          << "[checkpoint] an input was made inside another checkpoint's run: "
          << *x;
      versions.push_back(*x ? x->storage()->version() : 0);
    }
  }

  // Inside another checkpoint the frame is the outer one's, so that its replay
  // finds what this one kept. A first run that did not end left nothing.
  static std::shared_ptr<CheckpointFrame> frame_of(
      const RecomputePolicy& policy) {
    FrameScope* outer = FrameScope::current();
    std::shared_ptr<CheckpointFrame> frame =
        outer != nullptr ? outer->next_child()
                         : std::make_shared<CheckpointFrame>();
    if (!frame->complete) {
      *frame = {};
      frame->keep = policy.keep;
    }
    return frame;
  }

  std::unique_ptr<CheckpointBody> body;
  const std::vector<Tensor*> inputs;
  const std::shared_ptr<CheckpointFrame> frame;
  const bool recording = grad_mode() == GradMode::kOn;
  std::vector<uint32_t> versions;
  std::optional<GradModeScope> shadow{GradMode::kShadow};
  std::optional<FrameScope> scope;
};

FirstRun::FirstRun(const RecomputePolicy& policy,
                   std::unique_ptr<CheckpointBody> body)
    : state_(std::make_unique<State>(policy, std::move(body))) {}
FirstRun::~FirstRun() = default;

void FirstRun::finish(const std::vector<Tensor*>& outputs) {
  State& s = *state_;
  s.scope->end();
  s.shadow.reset();
  for (size_t i = 0; i < s.inputs.size(); ++i) {
    const Tensor& x = *s.inputs[i];
    CHECK(!x || x.storage()->version() == s.versions[i])
        << "[checkpoint] layer '" << layer_path(layer_scope())
        << "' writes its input: " << x;
  }
  if (!s.recording) return;
  std::vector<Tensor*> differentiable;
  std::vector<OutputSpec> specs;
  differentiable.reserve(outputs.size());
  specs.reserve(outputs.size());
  for (Tensor* y : outputs) {
    // What comes from outside goes back as it is: its later uses add to it in
    // the order they would have without the checkpoint.
    const bool passed_on = y->requires_grad && y->tape != 0;
    specs.push_back({static_cast<bool>(*y), y->requires_grad, passed_on,
                     y->dtype(), y->shape()});
    if (y->requires_grad && !passed_on) differentiable.push_back(y);
  }
  if (differentiable.empty()) return;
  FrameScope& scope = *s.scope;
  std::vector<TapePosition> edges;
  edges.reserve(scope.touched.size());
  for (const Touched& t : scope.touched) edges.push_back(t.at);
  auto* node = push_at<CheckpointNode>("checkpoint", edges, differentiable);
  node->specs = std::move(specs);
  node->parameters = std::move(scope.parameters);
  node->constants = std::move(scope.constants);
  node->leaves = std::vector<SavedTensor>(s.inputs.size());
  node->places.reserve(s.inputs.size());
  for (size_t i = 0; i < s.inputs.size(); ++i) {
    Tensor& x = *s.inputs[i];
    if (x && x.requires_grad) {
      const FrameScope::Place& place = scope.place_of(position(x));
      if (place.touched >= 0) node->places.emplace_back(i, place.at);
    }
    // Saved through the hooks of the call, which may move its bytes: nothing
    // else of the node holds them.
    node->leaves[i].save(std::exchange(x, Tensor()));
  }
  node->touched = std::move(scope.touched);
  node->body = std::move(s.body);
  node->frame = s.frame;
  node->frame->save_kept();
}

}  // namespace internal
}  // namespace tapeline
