#include "autograd/checkpoint.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "autograd/tape.h"

namespace tapeline {
namespace internal {
namespace {

std::atomic<int64_t> replays = 0, stash_reads = 0, kept_ops = 0;

std::string layer() { return "layer '" + layer_path(layer_scope()) + "'"; }
std::string differs() {
  return "[checkpoint] replay of " + layer() + " differs: ";
}
void check_same(const char* what, const char* now, size_t number,
                const char* then) {
  CHECK(std::strcmp(then, now) == 0)
      << differs() << what << " number " << number << " is " << now
      << ", it was " << then;
}
const Tensor& unwritten(const Watched& x, const char* what) {
  return x.value("checkpoint", what, layer_scope());
}

// What one call of a checkpoint keeps for its replays. Read by index: a
// retained tape replays it again.
struct Frame {
  struct Stashed {
    std::any value;
    std::vector<Watched> tensors;
  };
  // Outputs of an op, until the checkpoint's node saves them.
  struct Kept {
    const char* op;
    std::vector<Watched> outputs;
    std::vector<SavedTensor> saved;
  };
  std::vector<std::string> keep;  // ops that are kept, and whether all are
  bool keep_all = false;
  bool complete = false;  // the first run is over
  std::vector<Stashed> stash;
  std::vector<Kept> kept;
  std::vector<std::shared_ptr<Frame>> children;  // nested, in order
  std::vector<const char*> ops;  // names, in order: replays run the same

  // By the node being recorded, through the hooks in force.
  void save_kept() {
    for (Kept& k : kept) {
      if (!k.saved.empty()) continue;
      k.saved = std::vector<SavedTensor>(k.outputs.size());
      for (size_t i = 0; i < k.outputs.size(); ++i) {
        k.saved[i].save(unwritten(k.outputs[i], "a kept output"));
      }
      k.outputs.clear();
    }
    for (const auto& child : children) child->save_kept();
  }
};

}  // namespace

// A run in Shadow mode has `inputs`, which outlive it, and notes what it uses.
// A replay has none: it records on the current tape.
struct CheckpointRun {
  CheckpointRun(Frame& of, Phase in, const std::vector<Tensor*>* shadow_inputs)
      : frame(of), phase(in), inputs(shadow_inputs), first(!of.complete) {
    if (inputs == nullptr) return;
    edges.reserve(inputs->size());
    for (const Tensor* x : *inputs) {
      if (x->requires_grad && x->tape != 0) is_new_edge(position(*x));
    }
  }

  // CHECKs that a replay uses everything that was kept.
  std::vector<Tensor*> run(CheckpointBody& body) {
    const Scoped<CheckpointRun*> here(running, this);
    // A replay may come when what is around the call is over.
    const Scoped<bool> all(keeps_all, frame.keep_all);
    std::vector<Tensor*> outputs = body.run();
    frame.complete = true;
    if (first) return outputs;
    CHECK(stash == frame.stash.size() && kept == frame.kept.size() &&
          child == frame.children.size())
        << differs() << stash << " of " << frame.stash.size()
        << " stashed values, " << kept << " of " << frame.kept.size()
        << " kept ops and " << child << " of " << frame.children.size()
        << " checkpoints inside were used";
    CHECK_EQ(op, frame.ops.size())
        << differs() << "op number " << op << " would be "
        << frame.ops[std::min(op, frame.ops.size() - 1)] << "; ";
    return outputs;
  }

  // Also by the Shadow runs around this one.
  void note_uses(std::span<const Tensor* const> tensors,
                 std::span<const Parameter* const> used) {
    if (inputs == nullptr) return;
    for (const Tensor* x : tensors) {
      if (*x && (x->requires_grad ? x->tape != 0 && is_new_edge(position(*x))
                                  : is_new_constant(x->storage()))) {
        outside.emplace_back(*x);
      }
    }
    for (const Parameter* p : used) {
      const auto same = [&](const ParameterUse& use) {
        return use.parameter().key() == p->key();
      };
      if (std::none_of(parameters.begin(), parameters.end(), same)) {
        parameters.emplace_back(*p);
      }
    }
    if (outer != nullptr) outer->note_uses(tensors, used);
  }

  // A list: it is asked in about the order in which it was made.
  bool is_new_edge(const TapePosition& at) {
    if (at > last_edge) {  // made later than all that are known
      last_edge = at;
    } else {
      for (size_t n = edges.size(); n > 0; --n) {
        if (++edge >= edges.size()) edge = 0;
        if (edges[edge] == at) return false;
      }
    }
    edge = edges.size();
    edges.push_back(at);
    return true;
  }

  bool is_new_constant(const StoragePtr& storage) const {
    const auto same = [&](const Tensor& x) { return x.storage() == storage; };
    return storage->id() < made_before &&
           std::none_of(outside.begin(), outside.end(),
                        [&](const Watched& w) { return same(w.tensor); }) &&
           std::none_of(inputs->begin(), inputs->end(),
                        [&](const Tensor* input) { return same(*input); });
  }

  Frame& frame;
  const Phase phase;
  const std::vector<Tensor*>* const inputs;
  const bool first;
  CheckpointRun* const outer = running;
  const Tape::State* const tape = current_tape();
  const uint64_t made_before = Storage::next_id();  // storages with lower ids
  // How many of the frame's a replay has used.
  size_t stash = 0, child = 0, op = 0, kept = 0;
  // What a Shadow run used, none of it to be written before a replay:
  // differentiable inputs and captured tensors by their places,
  std::vector<TapePosition> edges;
  size_t edge = 0;         // the one that was found last
  TapePosition last_edge;  // the greatest
  // captured tensors and constants (inputs are watched by their saved tensors),
  std::vector<Watched> outside;
  std::vector<ParameterUse> parameters;
};

namespace {

class CheckpointNode : public Node {
 public:
  void backward_inputs(Backward& b) override {
    for (const ParameterUse& use : parameters) use.value();
    local_ = std::make_unique<Tape>("replay of '" + layer_path(scope) + "'");
    std::vector<Seed> seeds = make_inputs(b);
    replay(b, seeds);
    const bool both = b.parts() == Parts::kBoth;
    std::vector<Tensor> gradients =
        both ? local_->backward(seeds, b.parameter_gradients())
             : local_->backward_inputs(seeds, b.parameter_gradients());
    for (size_t e = 0; e < gradients.size(); ++e) {
      if (gradients[e]) b.add(static_cast<int>(e), std::move(gradients[e]));
    }
    // What W still needs is the local tape, if anything.
    if (both || local_->nodes() == 0) local_.reset();
    if (b.retained()) return;
    leaves.clear();
    outside.clear();
    frame.reset();
    body.reset();
  }
  bool has_weights() const override { return local_ != nullptr; }
  void backward_weights(Backward& b) override {
    local_->backward_weights(b.parameter_gradients());
    local_.reset();
  }

  struct Leaf {
    SavedTensor saved;
    TapePosition at;  // on the outer tape, if it requires grad
  };
  struct Output {
    bool defined = false;
    bool requires_grad = false;
    bool passed_on = false;  // a differentiable tensor from outside
    DType dtype = DType::kF32;
    Shape shape;
  };
  std::shared_ptr<CheckpointBody> body;
  std::shared_ptr<Frame> frame;
  int site = use_site();
  std::vector<Leaf> leaves;
  std::vector<Watched> outside;
  std::vector<ParameterUse> parameters;
  std::vector<Output> outputs;

 private:
  // The body's, and inputs of the local tape in the order of edges. They have
  // the places of the outer tape: ops find their slots through the captures.
  std::vector<Seed> make_inputs(Backward& b) {
    std::vector<Seed> seeds;
    int edge = 0;
    const auto enter = [&](const Tensor& x, const TapePosition& at) {
      const auto [slot, fresh] = local_->state()->captures.try_emplace(at);
      if (!fresh) return;
      const Tensor local = local_->input(x);
      slot->second = local.slot;
      // What arrived from later uses comes first, as without a checkpoint.
      Tensor partial = b.take(edge++);
      if (partial) seeds.push_back({local, std::move(partial)});
    };
    const std::vector<Tensor*> inputs = body->inputs();
    for (size_t i = 0; i < leaves.size(); ++i) {
      Tensor x = leaves[i].saved.unpack();
      if (leaves[i].at.first != 0) enter(x, leaves[i].at);
      set_position(x, leaves[i].at);
      *inputs[i] = std::move(x);
    }
    for (const Watched& watched : outside) {
      const bool captured = watched.tensor.requires_grad;
      const Tensor& x = unwritten(
          watched, captured ? "a captured tensor" : "a tensor it uses");
      if (captured) enter(x, position(x));
    }
    return seeds;
  }

  // Adds the outputs' gradients to the seeds.
  void replay(Backward& b, std::vector<Seed>& seeds) {
    const UseSite at_site(site);
    CheckpointRun run(*frame, Phase::kReplay, nullptr);
    const RecordScope recording(*local_);
    const std::vector<Tensor*> made = run.run(*body);
    ++replays;
    Device::current().pool().note(MemoryEvent::kReplay, {});
    for (Tensor* x : body->inputs()) *x = Tensor();
    CHECK_EQ(made.size(), outputs.size()) << differs() << "another structure; ";
    int differentiable = 0;
    for (size_t i = 0; i < made.size(); ++i) {
      const Tensor now = std::exchange(*made[i], {});
      const Output& then = outputs[i];
      CHECK(static_cast<bool>(now) == then.defined &&
            now.shape() == then.shape && now.dtype() == then.dtype &&
            (then.passed_on || now.requires_grad == then.requires_grad))
          << differs() << "output " << i << " is " << now << ", it was "
          << then.shape << " " << name_of(then.dtype)
          << (then.requires_grad ? " with" : " without") << " gradient";
      if (!then.requires_grad || then.passed_on) continue;
      const Tensor& gradient = b.grad(differentiable++);
      if (gradient) seeds.push_back({now, gradient});
    }
  }

  std::unique_ptr<Tape> local_;
};

}  // namespace

void first_run(const RecomputePolicy& policy,
               const std::shared_ptr<CheckpointBody>& body) {
  const bool recording = grad_mode() == GradMode::kOn;
  // Inside a checkpoint the frame is the outer one's, so that its replay finds
  // what this one kept.
  std::shared_ptr<Frame> frame;
  if (running == nullptr || running->first) {
    frame = std::make_shared<Frame>();
    if (running != nullptr) running->frame.children.push_back(frame);
  } else {
    const auto& children = running->frame.children;
    CHECK(running->child < children.size())
        << differs() << "more checkpoints inside than the first time";
    frame = children[running->child++];
  }
  // A first run that did not end left nothing.
  if (!frame->complete) {
    *frame = {.keep = policy.keep, .keep_all = running && keeps_all};
  }
  const std::vector<Tensor*> inputs = body->inputs();
  std::vector<uint32_t> versions;
  versions.reserve(inputs.size());
  for (const Tensor* x : inputs) {
    CHECK(!recording || !x->requires_grad || x->tape != 0)
        << "[checkpoint] an input was made inside another checkpoint's run: "
        << *x;
    versions.push_back(*x ? x->storage()->version() : 0);
  }
  CheckpointRun run(*frame, phase(), &inputs);
  const std::vector<Tensor*> outputs = [&] {
    const GradModeScope shadow(GradMode::kShadow);
    return run.run(*body);
  }();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Tensor& x = *inputs[i];
    CHECK(!x || x.storage()->version() == versions[i])
        << "[checkpoint] " << layer() << " writes its input: " << x;
  }
  if (!recording) return;
  std::vector<Tensor*> differentiable;
  std::vector<CheckpointNode::Output> specs;
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
  auto* node =
      add_node<CheckpointNode>("checkpoint", run.edges.size(), differentiable);
  for (size_t e = 0; e < run.edges.size(); ++e) {
    node->input_slots[e] = slot_on(*current_tape(), run.edges[e], node->name);
  }
  node->body = body;
  node->frame = frame;
  node->leaves = std::vector<CheckpointNode::Leaf>(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i]->requires_grad) node->leaves[i].at = position(*inputs[i]);
    // Saved through the hooks of the call, which may move its bytes: nothing
    // else of the node holds them.
    node->leaves[i].saved.save(std::exchange(*inputs[i], {}));
  }
  node->outside = std::move(run.outside);
  node->parameters = std::move(run.parameters);
  node->outputs = std::move(specs);
  frame->save_kept();
}

bool records() {
  return grad_mode() == GradMode::kShadow ||
         (grad_mode() == GradMode::kOn && current_tape() != nullptr);
}
bool records_original() {
  return records() && grad_mode() == GradMode::kOn &&
         phase() == Phase::kOriginal;
}

GradMode note_op(const char* op, std::span<const Tensor* const> inputs,
                 std::span<const Parameter* const> parameters) {
  GradMode mode = grad_mode();
  // Code that turns recording on inside a checkpoint's first run means the
  // replay: here it would put its nodes on the tape around.
  if (mode == GradMode::kOn && running && running->inputs &&
      running->tape == current_tape()) {
    mode = GradMode::kShadow;
  }
  if (mode == GradMode::kOn && current_tape() == nullptr) mode = GradMode::kOff;
  if (mode == GradMode::kOff || running == nullptr) return mode;
  if (mode == GradMode::kShadow) running->note_uses(inputs, parameters);
  if (std::strcmp(op, "observe") == 0) return mode;  // whoever looks
  auto& ops = running->frame.ops;
  if (running->first) {
    ops.push_back(op);
  } else {
    const size_t n = running->op++;
    check_same("op", op, n, n < ops.size() ? ops[n] : "none");
  }
  return mode;
}

void make_outputs(const char* op, std::initializer_list<Tensor*> outputs,
                  absl::FunctionRef<void()> make) {
  if (running == nullptr) return make();
  const auto& keep = running->frame.keep;
  auto& kept = running->frame.kept;
  if (!keeps_all && std::find(keep.begin(), keep.end(), op) == keep.end()) {
    return make();
  }
  if (running->first) {
    make();
    kept.push_back({op});
    for (Tensor* x : outputs) kept.back().outputs.emplace_back(*x);
    return;
  }
  const size_t n = running->kept++;
  check_same("kept op", op, n, n < kept.size() ? kept[n].op : "none");
  size_t i = 0;
  for (Tensor* output : outputs) {
    *output = kept[n].saved.empty()
                  ? unwritten(kept[n].outputs[i], "a kept output")
                  : kept[n].saved[i].unpack();
    ++i;
  }
  ++kept_ops;
}

const std::any* next_stash(const std::type_info& type) {
  if (running->first) return nullptr;
  const auto& stash = running->frame.stash;
  const size_t n = running->stash++;
  CHECK(n < stash.size() && stash[n].value.type() == type)
      << differs() << "stash number " << n << " of " << stash.size()
      << " is missing or of another type";
  for (const Watched& x : stash[n].tensors) unwritten(x, "a stashed tensor");
  ++stash_reads;
  return &stash[n].value;
}

void keep_stash(std::any value, const std::vector<Tensor*>& tensors) {
  auto& stashed = running->frame.stash.emplace_back();
  stashed.value = std::move(value);
  for (const Tensor* x : tensors) {
    CHECK(!x->requires_grad) << "[stash] " << *x << " requires a gradient";
    if (*x) stashed.tensors.emplace_back(*x);
  }
}

}  // namespace internal

Phase phase() {
  return internal::running == nullptr ? Phase::kOriginal
                                      : internal::running->phase;
}

CheckpointCounters checkpoint_counters() {
  return {internal::replays, internal::stash_reads, internal::kept_ops};
}

}  // namespace tapeline
