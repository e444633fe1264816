#include "autograd/checkpoint.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace tapeline {
namespace internal {
namespace {

std::atomic<int64_t> replays = 0, stash_reads = 0, kept_ops = 0;

// Steps that are no ops.
constexpr const char* kKept = "a kept op";
constexpr const char* kStash = "a stash";
constexpr const char* kCheckpoint = "a checkpoint";
constexpr const char* kEnd = "the end";

std::string layer() { return "layer '" + layer_path(layer_scope()) + "'"; }
std::string differs() {
  return "[checkpoint] replay of " + layer() + " differs: ";
}

// A tensor whose bytes nobody may write meanwhile.
struct Watched {
  explicit Watched(Tensor x)
      : tensor(std::move(x)),
        version(tensor ? tensor.storage()->version() : 0) {}
  const Tensor& unwritten(const char* what) const {
    check_unwritten(tensor, version, "checkpoint", what, layer_scope());
    return tensor;
  }

  Tensor tensor;
  uint32_t version;
};

// What one call of a checkpoint did, step by step: its replays do the same, and
// read what they are not to make again. By index: a retained tape replays it
// again.
struct Frame {
  // By a step that is no op.
  struct Held {
    std::any value;  // of a stash
    // In that, or the outputs of a kept op until the checkpoint's node saves
    // them.
    std::vector<Watched> tensors;
    std::vector<SavedTensor> saved;
    std::shared_ptr<Frame> inside;  // of a nested checkpoint
  };
  std::vector<std::string> keep;  // ops that are kept, and whether all are
  bool keep_all = false;
  std::vector<const char*> steps;  // an op's name, or one from above
  std::vector<Held> held;          // in order

  // By the node being recorded, through the hooks in force.
  void save_kept() {
    for (Held& h : held) {
      if (h.inside != nullptr) h.inside->save_kept();
      if (h.value.has_value() || h.tensors.empty()) continue;
      h.saved = std::vector<SavedTensor>(h.tensors.size());
      for (size_t i = 0; i < h.saved.size(); ++i) {
        h.saved[i].save(h.tensors[i].unwritten("a kept output"));
      }
      h.tensors.clear();
    }
  }
};

}  // namespace

// The first run of a call is in Shadow mode. It has `inputs`, which outlive it,
// and notes what it uses, as do those that its call is replayed in. A replay
// has none: it records on the current tape.
struct CheckpointRun {
  CheckpointRun(Frame& of, bool is_first, Phase in,
                const std::vector<const Tensor*>* shadow_inputs)
      : frame(of), first(is_first), phase(in), inputs(shadow_inputs) {
    if (inputs == nullptr) return;
    edges.reserve(inputs->size());
    for (const Tensor* x : *inputs) {
      if (x->requires_grad && x->tape != 0) is_new_edge(*x);
    }
  }

  template <class F>
  auto run(const F& function) {
    const Scoped<CheckpointRun*> here(running, this);
    // A replay may come when what is around the call is over.
    const Scoped<bool> all(keeps_all, frame.keep_all);
    auto outputs = function();
    if (!first && at != frame.steps.size()) next(kEnd);
    return outputs;
  }

  // Notes a step, or finds that it is the same one.
  void next(const char* step) {
    if (first) return frame.steps.push_back(step);
    const char* then = at < frame.steps.size() ? frame.steps[at] : kEnd;
    CHECK(step == then || std::strcmp(step, then) == 0)
        << differs() << "step " << at << " of " << frame.steps.size() << " is "
        << step << ", it was " << then;
    ++at;
  }
  Frame::Held& next_held(const char* step) {
    next(step);
    return first ? frame.held.emplace_back() : frame.held[held++];
  }

  // Also by the Shadow runs around this one.
  void note_uses(absl::Span<const Tensor* const> tensors,
                 absl::Span<const Parameter* const> used) {
    if (inputs == nullptr) return;
    for (const Tensor* x : tensors) {
      if (*x && (x->requires_grad ? x->tape != 0 && is_new_edge(*x)
                                  : is_new_constant(x->storage()))) {
        outside.emplace_back(*x);
      }
    }
    for (const Parameter* p : used) {
      const auto same = [&](const ParameterUse& use) {
        return use.parameter.key() == p->key();
      };
      if (std::none_of(parameters.begin(), parameters.end(), same)) {
        parameters.emplace_back(*p);
      }
    }
    if (outer != nullptr) outer->note_uses(tensors, used);
  }

  // A list: it is asked in about the order in which it was made.
  bool is_new_edge(const TapePosition& at) {
    if (last_edge < at) {  // made later than all that are known
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
  const bool first;
  const Phase phase;
  const std::vector<const Tensor*>* const inputs;
  CheckpointRun* const outer = running;
  const uint64_t made_before = Storage::next_id();  // storages with lower ids
  size_t at = 0, held = 0;  // how many of the frame's a replay has used
  // What a Shadow run used, none of it to be written before a replay:
  // differentiable inputs and captured tensors by their places,
  std::vector<TapePosition> edges;
  size_t edge = 0;         // the one that was found last
  TapePosition last_edge;  // the greatest
  // captured tensors and constants (inputs are watched by how they are packed),
  std::vector<Watched> outside;
  std::vector<ParameterUse> parameters;
};

namespace {

// What an output was like, and is again.
struct Output {
  // Made on `tape`, or in Shadow mode; else it comes from outside.
  Output(const Tensor& y, uint64_t tape)
      : shape(y.shape()),
        dtype(y.dtype()),
        defined(y),
        requires_grad(y.requires_grad),
        passed_on(y.requires_grad && y.tape != tape) {}
  bool operator==(const Output&) const = default;

  [[no_unique_address]] Shape shape;  // what follows lies in its padding
  DType dtype;
  bool defined, requires_grad;
  // It goes back as it is: its later uses add to it in the order they would
  // have without the checkpoint.
  bool passed_on;
};

class CheckpointNode : public Node {
 public:
  void backward_inputs(Backward& b) override {
    for (const ParameterUse& use : parameters) use.value();
    local_ = std::make_unique<Tape>("replay of '" + layer_path(scope) + "'");
    std::vector<Seed> seeds;
    replay(b, enter_inputs(b, seeds), seeds);
    std::vector<Tensor> gradients = local_->backward(
        seeds, b.parameter_gradients(), Retain::kNo, b.parts());
    for (size_t e = 0; e < gradients.size(); ++e) {
      if (gradients[e]) b.add(static_cast<int>(e), std::move(gradients[e]));
    }
    // What W still needs is the local tape, if anything.
    if (b.parts() == Parts::kBoth || local_->nodes() == 0) local_.reset();
    if (b.retained()) return;
    packings.clear();
    outside.clear();
    frame.reset();
    body.reset();
  }
  bool has_weights() const override { return local_ != nullptr; }
  void backward_weights(Backward& b) override {
    local_->backward_weights(b.parameter_gradients());
    local_.reset();
  }

  // Its inputs keep their places on the outer tape, however they are packed.
  std::unique_ptr<CheckpointBody> body;
  std::vector<Packing> packings;  // of its inputs; they end before the body
  std::shared_ptr<Frame> frame;
  int site = use_site();
  std::vector<Watched> outside;
  std::vector<ParameterUse> parameters;
  std::vector<Output> outputs;

 private:
  // Returns the body's inputs. Those, and what it captured, are inputs of the
  // local tape in the order of edges. They have the places of the outer tape:
  // ops find their slots through the captures.
  std::vector<Tensor> enter_inputs(Backward& b, std::vector<Seed>& seeds) {
    int edge = 0;
    const auto enter = [&](const Tensor& x) {
      const auto [slot, fresh] = local_->state()->captures.try_emplace(x);
      if (!fresh) return;
      const Tensor local = local_->input(x);
      slot->second = local.slot;
      // What arrived from later uses comes first, as without a checkpoint.
      Tensor partial = b.take(edge++);
      if (partial) seeds.push_back({local, std::move(partial)});
    };
    std::vector<Tensor> inputs;
    for (const Tensor* packed : body->inputs()) {
      inputs.push_back(packings[inputs.size()].unpack(*packed));
      inputs.back().position() = *packed;
      if (packed->requires_grad) enter(inputs.back());
    }
    for (const Watched& watched : outside) {
      const bool captured = watched.tensor.requires_grad;
      const Tensor& x = watched.unwritten(captured ? "a captured tensor"
                                                   : "a tensor it uses");
      if (captured) enter(x);
    }
    return inputs;
  }

  // Adds the outputs' gradients to the seeds.
  void replay(Backward& b, std::vector<Tensor> inputs,
              std::vector<Seed>& seeds) {
    const UseSite at_site(site);
    CheckpointRun run(*frame, /*is_first=*/false, Phase::kReplay, nullptr);
    const RecordScope recording(*local_);
    const std::vector<Tensor> made =
        run.run([&] { return body->run(std::move(inputs)); });
    ++replays;
    Device::current().pool().note(MemoryEvent::kReplay, {});
    CHECK_EQ(made.size(), outputs.size()) << differs() << "another structure; ";
    int differentiable = 0;
    for (size_t i = 0; i < made.size(); ++i) {
      const Output now(made[i], local_->id());
      const Output& then = outputs[i];
      CHECK(now == then) << differs() << "output " << i << " is " << made[i]
                         << ", it was " << then.shape << " "
                         << name_of(then.dtype)
                         << (then.requires_grad ? " with" : " without")
                         << " gradient";
      if (!then.requires_grad || then.passed_on) continue;
      const Tensor& gradient = b.grad(differentiable++);
      if (gradient) seeds.push_back({made[i], gradient});
    }
  }

  std::unique_ptr<Tape> local_;
};

// Grows with every write of one.
uint64_t writes(const std::vector<const Tensor*>& tensors) {
  uint64_t sum = 0;
  for (const Tensor* x : tensors) sum += *x ? x->storage()->version() : 0;
  return sum;
}

// Of a call. Inside a checkpoint it is the outer frame's, so that its replay
// finds what this one kept.
std::shared_ptr<Frame> frame_of(const RecomputePolicy& policy) {
  std::shared_ptr<Frame> own;
  auto& frame =
      running == nullptr ? own : running->next_held(kCheckpoint).inside;
  if (frame == nullptr) {
    frame = std::make_shared<Frame>();
    frame->keep = policy.keep;
    frame->keep_all = running != nullptr && keeps_all;
  }
  return frame;
}

}  // namespace

void first_run(const RecomputePolicy& policy,
               const std::vector<const Tensor*>& inputs,
               absl::FunctionRef<std::vector<Tensor*>()> function,
               absl::FunctionRef<std::unique_ptr<CheckpointBody>()> make_body) {
  const bool recording = op_mode() == GradMode::kOn;
  const bool first = running == nullptr || running->first;
  const std::shared_ptr<Frame> frame = frame_of(policy);
  // Inputs are edges of its node in a replay, whether it uses them or not.
  if (running != nullptr) running->note_uses(inputs, {});
  for (const Tensor* x : inputs) {
    CHECK(!recording || !x->requires_grad || x->tape != 0)
        << "[checkpoint] an input was made inside another checkpoint's run: "
        << *x;
  }
  const uint64_t before = writes(inputs);
  CheckpointRun run(*frame, first, phase(), &inputs);
  std::vector<Tensor*> outputs = [&] {
    const GradModeScope shadow(GradMode::kShadow);
    const Scoped<Tape::State*> no_tape(internal::recording, nullptr);
    return run.run(function);
  }();
  CHECK_EQ(writes(inputs), before)
      << "[checkpoint] " << layer() << " writes its input; ";
  if (!recording) return;
  std::vector<Output> specs;
  specs.reserve(outputs.size());
  for (const Tensor* y : outputs) specs.emplace_back(*y, /*tape=*/0);
  std::erase_if(outputs, [](const Tensor* y) {
    return !y->requires_grad || y->tape != 0;
  });
  if (outputs.empty()) return;
  for (const ParameterUse& use : run.parameters) {
    current_tape()->note_use(use.parameter);
  }
  auto* node = add_node<CheckpointNode>("checkpoint", run.edges.size(),
                                        absl::MakeSpan(outputs));
  for (size_t e = 0; e < run.edges.size(); ++e) {
    node->input_slots[e] = slot_on(*current_tape(), run.edges[e], node->name);
  }
  // Packed by the hooks around the call, which may move the bytes: nothing else
  // of the node holds them.
  node->body = make_body();
  node->packings = std::vector<Packing>(inputs.size());
  size_t packed = 0;
  for (Tensor* x : node->body->inputs()) {
    node->packings[packed].pack(*x);
    x->position() = *inputs[packed++];
  }
  node->frame = frame;
  node->outside = std::move(run.outside);
  node->parameters = std::move(run.parameters);
  node->outputs = std::move(specs);
  frame->save_kept();
}

GradMode note_op(const char* op, absl::Span<const Tensor* const> inputs,
                 absl::Span<const Parameter* const> parameters) {
  const GradMode mode = op_mode();
  if (mode == GradMode::kOff || running == nullptr) return mode;
  if (mode == GradMode::kShadow) running->note_uses(inputs, parameters);
  if (op != kObserveOp) running->next(op);
  return mode;
}

void make_outputs(const char* op, absl::Span<Tensor* const> outputs,
                  absl::FunctionRef<void()> make) {
  if (running == nullptr) return make();
  const auto& keep = running->frame.keep;
  if (!keeps_all && std::find(keep.begin(), keep.end(), op) == keep.end()) {
    return make();
  }
  if (running->first) {
    make();
    Frame::Held& step = running->next_held(kKept);
    for (Tensor* x : outputs) step.tensors.emplace_back(*x);
    return;
  }
  const Frame::Held& step = running->next_held(kKept);
  CHECK_EQ(step.saved.size(), outputs.size()) << differs() << op << "; ";
  for (size_t i = 0; i < outputs.size(); ++i) {
    *outputs[i] = step.saved[i].unpack();
  }
  ++kept_ops;
}

const std::any* next_stash(const std::type_info& type) {
  if (running->first) return nullptr;
  const Frame::Held& step = running->next_held(kStash);
  CHECK(step.value.type() == type) << differs() << "a stash of another type";
  for (const Watched& x : step.tensors) x.unwritten("a stashed tensor");
  ++stash_reads;
  return &step.value;
}

void keep_stash(std::any value, const std::vector<const Tensor*>& tensors) {
  Frame::Held& step = running->next_held(kStash);
  step.value = std::move(value);
  for (const Tensor* x : tensors) {
    CHECK(!x->requires_grad) << "[stash] " << *x << " requires a gradient";
    step.tensors.emplace_back(*x);
  }
}

}  // namespace internal

Phase phase() {
  if (internal::refilling) return Phase::kReplay;
  return internal::running == nullptr ? Phase::kOriginal
                                      : internal::running->phase;
}

CheckpointCounters checkpoint_counters() {
  return {internal::replays, internal::stash_reads, internal::kept_ops};
}

}  // namespace tapeline
