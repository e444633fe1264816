#include "autograd/checkpoint.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "autograd/checkpoint_frame.h"
#include "autograd/tape.h"
#include "autograd/tape_state.h"

namespace tapeline {

using internal::CheckpointBody;
using internal::CheckpointFrame;
using internal::FrameScope;
using internal::TouchedTensor;

namespace {

std::atomic<int64_t> replay_count{0}, stash_read_count{0}, kept_op_count{0};

// What of the surroundings a replay sees as the first run did.
struct Surroundings {
  int site = use_site();
  uint32_t scope = layer_scope();
};

struct OutputSpec {
  bool defined, requires_grad;
  Shape shape;
  DType dtype;
  bool passed_on = false;  // a differentiable tensor from outside: no output
};
OutputSpec spec_of(const Tensor& x) {
  if (!x) return {false, false, {}, DType::kF32};
  return {true, x.requires_grad, x.shape(), x.dtype()};
}

// A tensor's storage and how often it was written.
using Version = std::pair<Tensor, uint32_t>;
// `where` makes the message's beginning, on failure alone.
template <class Where>
void check_versions(const std::vector<Version>& versions, const Where& where) {
  for (const auto& [tensor, version] : versions) {
    CHECK_EQ(tensor.storage()->version(), version)
        << where() << "a tensor it uses was written in place: " << tensor
        << "; ";
  }
}

class CheckpointNode : public Node {
 public:
  void backward_inputs(Backward& b) override {
    local_ = std::make_unique<Tape>("replay of '" +
                                    layer_path(surroundings.scope) + "'");
    check_versions(constants, [&] { return where(); });
    for (const ParameterUse& use : parameters) use.value();
    std::vector<Tensor> inputs;
    for (int i = 0; i < leaf_count; ++i) {
      inputs.push_back(leaves[i] ? leaves[i].unpack() : Tensor());
    }
    std::vector<Seed> seeds;
    for (size_t e = 0; e < touched.size(); ++e) {
      const Tensor local = local_->input(edge_value(touched[e], inputs));
      local_->state()->captures[{touched[e].tape, touched[e].slot}] =
          local.slot;
      // What arrived from later uses comes first, as without a checkpoint.
      if (Tensor partial = b.take(static_cast<int>(e))) {
        seeds.push_back({local, std::move(partial)});
      }
    }
    std::vector<Tensor> outputs = replay(std::move(inputs));
    CHECK_EQ(outputs.size(), specs.size()) << where() << "another structure; ";
    int differentiable = 0;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const OutputSpec now = spec_of(outputs[i]), then = specs[i];
      CHECK(now.defined == then.defined && now.shape == then.shape &&
            now.dtype == then.dtype &&
            (then.passed_on || now.requires_grad == then.requires_grad))
          << where() << "output " << i << " is " << outputs[i] << ", it was "
          << then.shape << " " << name_of(then.dtype)
          << (then.requires_grad ? " with" : " without") << " gradient";
      if (!then.requires_grad || then.passed_on) continue;
      const Tensor& gradient = b.grad(differentiable++);
      if (gradient) seeds.push_back({outputs[i], gradient});
    }
    outputs.clear();
    replay_count.fetch_add(1, std::memory_order_relaxed);
    Device::current().pool().note(MemoryEvent::kReplay, {});
    const bool both = b.parts() == Parts::kBoth;
    std::vector<Tensor> gradients =
        both ? local_->backward(seeds, b.parameter_gradients())
             : local_->backward_inputs(seeds, b.parameter_gradients());
    for (size_t e = 0; e < gradients.size(); ++e) {
      if (gradients[e]) b.add(static_cast<int>(e), std::move(gradients[e]));
    }
    if (both) {
      local_.reset();
      return;
    }
    // What W still needs is the local tape, if anything.
    leaves.reset();
    leaf_count = 0;
    touched.clear();
    constants.clear();
    frame.reset();
    body.reset();
    const auto& stash = local_->state()->weight_stash;
    if (std::all_of(stash.begin(), stash.end(),
                    [](const auto& grads) { return grads.empty(); })) {
      local_.reset();
    }
  }
  bool has_weights() const override { return local_ != nullptr; }
  void backward_weights(Backward& b) override {
    local_->backward_weights(b.parameter_gradients());
    local_.reset();
  }

  std::shared_ptr<CheckpointBody> body;
  std::shared_ptr<CheckpointFrame> frame;
  Surroundings surroundings;
  std::vector<TouchedTensor> touched;  // this node's inputs
  std::vector<OutputSpec> specs;
  std::vector<ParameterUse> parameters;
  std::vector<Version> constants;
  std::unique_ptr<SavedTensor[]> leaves;
  std::vector<int> edge_of_leaf;  // its place in `touched`; -1: no gradient
  int leaf_count = 0;

 private:
  std::string where() const {
    return "[checkpoint] replay of layer '" + layer_path(surroundings.scope) +
           "' differs: ";
  }
  Tensor edge_value(const TouchedTensor& t,
                    const std::vector<Tensor>& inputs) const {
    if (t.leaf >= 0) return inputs[static_cast<size_t>(t.leaf)];
    CHECK_EQ(t.value.storage()->version(), t.version)
        << where() << "a captured tensor was written in place: " << t.value
        << "; ";
    return t.value;
  }

  std::vector<Tensor> replay(std::vector<Tensor> inputs) {
    // Handles of the outer tape: ops find their slots through the captures.
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (edge_of_leaf[i] < 0) continue;
      const TouchedTensor& t = touched[static_cast<size_t>(edge_of_leaf[i])];
      Tensor& x = inputs[i];
      x.requires_grad = true;
      x.tape = t.tape;
      x.slot = t.slot;
    }
    const UseSite site(surroundings.site);
    const internal::LayerScopeAt scope(surroundings.scope);
    const RecordScope recording(*local_);
    const FrameScope running(*frame, Phase::kReplay, /*shadow=*/false,
                             local_->state());
    std::vector<Tensor> outputs = body->run(inputs);
    running.check_complete();
    return outputs;
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

bool stashing() { return FrameScope::current() != nullptr; }

std::shared_ptr<void> next_stash(const std::type_info& type) {
  std::shared_ptr<void> kept = FrameScope::current()->next_stash(type);
  if (kept) stash_read_count.fetch_add(1, std::memory_order_relaxed);
  return kept;
}

void keep_stash(std::shared_ptr<void> value, const std::type_info& type,
                const std::vector<Tensor>& tensors) {
  std::vector<Version> versions;
  for (const Tensor& t : tensors) {
    if (t) versions.emplace_back(t, t.storage()->version());
  }
  FrameScope::current()->frame().stash.push_back(
      {std::move(value), &type, std::move(versions)});
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
  if (FrameScope::current() != nullptr) FrameScope::current()->keep_all(1);
}
KeepScope::~KeepScope() {
  if (FrameScope::current() != nullptr) FrameScope::current()->keep_all(-1);
}

std::vector<Tensor> run_checkpoint(const RecomputePolicy& policy,
                                   std::shared_ptr<CheckpointBody> body,
                                   const std::vector<Tensor>& leaves) {
  const bool records =
      grad_mode() == GradMode::kOn && current_tape() != nullptr;
  if (!records && grad_mode() == GradMode::kOn) return body->run(leaves);
  // Inside another checkpoint the frame is the outer one's, so that its replay
  // finds what this one kept.
  FrameScope* outer = FrameScope::current();
  std::shared_ptr<CheckpointFrame> frame =
      outer != nullptr ? outer->next_child()
                       : std::make_shared<CheckpointFrame>();
  if (!frame->complete) frame->keep = policy.keep;
  std::vector<Version> before;
  for (const Tensor& leaf : leaves) {
    if (!leaf) continue;
    CHECK(!records || !leaf.requires_grad || leaf.tape != 0)
        << "[checkpoint] an input was made inside another checkpoint's run: "
        << leaf;
    before.emplace_back(leaf, leaf.storage()->version());
  }
  std::vector<TouchedTensor> touched;
  std::vector<ParameterUse> parameters;
  std::vector<Version> constants;
  internal::TouchedIndex index;
  std::vector<Tensor> outputs;
  {
    const GradModeScope shadow(GradMode::kShadow);
    FrameScope running(*frame, phase(), /*shadow=*/true, current_tape());
    outputs = body->run(leaves);
    running.check_complete();
    touched = running.take_touched(index);
    parameters = running.take_parameters();
    constants = running.take_constants();
  }
  check_versions(before, [] {
    return "[checkpoint] layer '" + layer_path(layer_scope()) +
           "' writes its input: ";
  });
  if (!records) return outputs;
  std::vector<Tensor*> differentiable;
  std::vector<OutputSpec> specs;
  for (Tensor& output : outputs) {
    specs.push_back(spec_of(output));
    if (!specs.back().requires_grad) continue;
    // What comes from outside goes back as it is: its later uses add to it in
    // the order they would have without the checkpoint.
    if (output.tape != 0) {
      specs.back().passed_on = true;
      continue;
    }
    output = output.detach();
    differentiable.push_back(&output);
  }
  if (differentiable.empty()) return outputs;
  std::vector<Tensor> handles;
  for (const TouchedTensor& t : touched) {
    Tensor handle = t.value;
    handle.requires_grad = true;
    handle.tape = t.tape;
    handle.slot = t.slot;
    handles.push_back(std::move(handle));
  }
  std::vector<const Tensor*> edges;
  for (const Tensor& handle : handles) edges.push_back(&handle);
  auto* node = push_always<CheckpointNode>("checkpoint", edges, differentiable);
  node->body = std::move(body);
  node->frame = std::move(frame);
  node->specs = std::move(specs);
  node->parameters = std::move(parameters);
  // Explicit inputs have their version checked by their saved tensor.
  for (Version& c : constants) {
    const uint64_t id = c.first.storage()->id();
    if (std::none_of(leaves.begin(), leaves.end(), [&](const Tensor& leaf) {
          return leaf && leaf.storage()->id() == id;
        })) {
      node->constants.push_back(std::move(c));
    }
  }
  node->leaf_count = static_cast<int>(leaves.size());
  node->leaves = std::make_unique<SavedTensor[]>(leaves.size());
  for (size_t i = 0; i < leaves.size(); ++i) {
    // Saved through the hooks of the call, which may move its bytes: nothing
    // else of the node holds them.
    if (leaves[i]) node->leaves[i].save(leaves[i]);
    const int edge = leaves[i] && leaves[i].requires_grad
                         ? index.find(touched, leaves[i])
                         : -1;
    node->edge_of_leaf.push_back(edge);
    if (edge < 0) continue;
    TouchedTensor& t = touched[static_cast<size_t>(edge)];
    if (t.leaf >= 0) continue;
    t.leaf = static_cast<int>(i);
    t.value = Tensor();
  }
  node->touched = std::move(touched);
  node->frame->save_kept();
  return outputs;
}

}  // namespace internal
}  // namespace tapeline
