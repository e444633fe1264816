// Tape: the ops of one forward pass in program order, and the way back.
//
//   auto [loss, tape] = record([&] { return model.loss(batch, context); });
//   tape.backward(loss, grads);
//
// A tape is a plain list of nodes, one tape per micro-batch in flight. Backward
// is one reverse sweep over gradient slots: no recursion, no dependency count,
// no threads. An activation gradient has its activation's dtype, is rounded
// after each addition, and is released as soon as its node has consumed it; a
// node and what it saved are freed right after, unless Retain::kYes.
//
// Every node has two parts. I (backward_inputs) makes gradients of its inputs,
// W (backward_weights) adds to the gradients of its parameters. backward() runs
// I then W node by node; backward_inputs() runs all I parts and keeps what W
// needs; backward_weights() runs the W parts later. Both ways add in the same
// order, so they give the same bits.
//
// A tensor's handle carries its tape and slot. Using a tensor of another tape
// in an op that records is a CHECK with both names: detach() it or mark it with
// input(). A tape is used by one thread at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <iosfwd>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "autograd/gradients.h"
#include "autograd/mode.h"
#include "autograd/saved_tensor.h"
#include "runtime/parameter.h"
#include "runtime/tensor.h"

namespace tapeline {

class Backward;

// One recorded op. Concrete nodes add what they saved.
class Node {
 public:
  virtual ~Node() = default;
  // I: reads b.grad(output), calls b.add(input, gradient).
  virtual void backward_inputs(Backward& b) = 0;
  // W: reads b.grad(output), adds into b.accumulator(use).
  virtual void backward_weights(Backward&) {}
  virtual bool has_weights() const { return false; }

  const char* name = "";
  uint32_t scope = 0;       // layer_path(scope)
  int64_t saved_bytes = 0;  // of all tensors it saved, before hooks
  // Slots of inputs, 0 where no gradient is wanted; those of outputs follow one
  // another from output_slot on.
  uint32_t* input_slots = nullptr;
  uint32_t output_slot = 0;
  uint16_t inputs = 0, outputs = 0;
  // For printing.
  Shape output_shape;                   // of output 0
  const PackedBy* packed_by = nullptr;  // hooks that packed what it saved
};

// A parameter as a node uses it: its value is not saved through hooks, but
// must not be written before backward either.
struct ParameterUse {
  ParameterUse() = default;
  explicit ParameterUse(const Parameter& of)
      : parameter(of),
        site(use_site()),
        trainable(of.trainable()),
        storage(of.value().storage()->id()),
        version(of.value().storage()->version()) {}
  // CHECKs that it was not written since.
  const Tensor& value() const {
    const Tensor& now = parameter.value();
    CHECK(now.storage()->id() == storage && now.storage()->version() == version)
        << "parameter '" << parameter.name() << "', " << now
        << ", was written between forward and backward";
    return now;
  }

  Parameter parameter;
  int site = 0;
  bool trainable = false;
  uint64_t storage = 0;
  uint32_t version = 0;
};

enum class Retain : bool { kNo, kYes };
// What a backward does of each node.
enum class Parts : uint8_t { kBoth, kInputs, kWeights };

// The gradients of a scalar (or of several outputs) that start a backward.
struct Seed {
  Tensor output;
  Tensor grad;
};

class Tape {
 public:
  struct State;

  explicit Tape(std::string name = "tape")
      : state_(std::make_unique<State>(std::move(name))) {}

  // A handle on x whose gradient backward returns: stage inputs, gradcheck.
  Tensor input(const Tensor& x);

  // Gradients of the inputs, in order of input(); undefined where none flowed.
  // They may share bytes with each other and with a seed: not to be written.
  std::vector<Tensor> backward(const std::vector<Seed>& seeds,
                               ParameterGradients& grads,
                               Retain retain = Retain::kNo,
                               Parts parts = Parts::kBoth);
  // Seeds a scalar loss with 1.
  std::vector<Tensor> backward(const Tensor& loss, ParameterGradients& grads,
                               Retain retain = Retain::kNo);
  std::vector<Tensor> backward_inputs(const std::vector<Seed>& seeds,
                                      ParameterGradients& grads) {
    return backward(seeds, grads, Retain::kNo, Parts::kInputs);
  }
  void backward_weights(ParameterGradients& grads);

  const std::string& name() const { return state_->name; }
  uint64_t id() const { return state_->id; }
  int64_t nodes() const { return state_->live; }
  // One line per node: op, layer, output shape, saved bytes, hooks that packed
  // them.
  void print(std::ostream& out) const;

  State* state() const { return state_.get(); }

  // The inside, for this folder. Nodes and what they save lie in chunks.
  struct State {
    explicit State(std::string name);
    ~State();
    // Memory for the tape's lifetime, aligned to 16.
    std::byte* allocate(size_t bytes);
    void free_node(size_t index);
    // By the node that is recorded next.
    void note_use(const Parameter& p) {
      if (p.trainable()) uses.emplace_back(p.key(), nodes.size());
    }
    // Hooks live as long as a tape that saved through them.
    void keep(const std::shared_ptr<SavedTensorHooks>& hooks);

    const std::string name;
    uint64_t id;
    std::vector<std::unique_ptr<std::byte[]>> chunks;
    size_t used = 0;           // of the last chunk
    std::vector<Node*> nodes;  // null once freed
    uint32_t next_slot = 1;
    std::vector<uint32_t> input_slots;
    // Of the backward that runs: gradients, of which those stay that W parts
    // wait for, and what it does.
    std::vector<Tensor> slots;
    Parts parts = Parts::kBoth;
    Retain retain = Retain::kNo;
    bool consumed = false;  // by a backward that retained nothing
    // Nodes not freed yet. Written by the tape's thread alone, so without the
    // price of a shared counter.
    std::atomic<int64_t> live = 0;
    // Trainable parameters and the nodes that use them, in order.
    std::vector<std::pair<const Parameter::State*, size_t>> uses;
    // Of a replay's tape: inputs by the (tape, slot) they have outside.
    std::map<TapePosition, uint32_t> captures;
    std::vector<std::shared_ptr<SavedTensorHooks>> hooks;
    // Saved tensors that no node owns; they end with the tape at the latest.
    std::vector<std::weak_ptr<SavedTensor>> unowned;
  };

 private:
  std::unique_ptr<State> state_;
};

namespace internal {
inline constinit thread_local Tape::State* recording = nullptr;
// Null where nothing records.
inline Tape::State* current_tape() { return recording; }
}  // namespace internal

// Makes `tape` current on this thread; recording is on inside.
class RecordScope {
 public:
  explicit RecordScope(Tape& tape);

 private:
  internal::Scoped<Tape::State*> tape_;
  GradModeScope mode_{GradMode::kOn};
};

template <class F>
auto record(Tape& tape, F&& f) {
  RecordScope scope(tape);
  return f();
}

template <class T>
struct Recorded {
  T value;
  Tape tape;
};

// Runs f on a new tape.
template <class F>
auto record(F&& f) -> Recorded<std::invoke_result_t<F>> {
  Tape tape;
  auto value = record(tape, std::forward<F>(f));
  return {std::move(value), std::move(tape)};
}

// What a node sees during backward.
class Backward {
 public:
  Backward(Tape::State& tape, Node& node, ParameterGradients& grads)
      : tape_(tape), node_(node), grads_(grads) {}

  // Contiguous; undefined if nothing flowed into that output.
  const Tensor& grad(int output = 0) const {
    return tape_.slots[node_.output_slot + static_cast<uint32_t>(output)];
  }
  bool needs(int input) const { return node_.input_slots[input] != 0; }
  // Will this node run again? Then it must not overwrite what it saved.
  bool retained() const { return tape_.retain == Retain::kYes; }
  Parts parts() const { return tape_.parts; }
  // Gives a gradient to an input that needs it (else does nothing).
  void add(int input, Tensor gradient);
  // Takes out what later uses of an input gave it so far; undefined if none.
  // The node adds it to its own and gives the sum to add().
  Tensor take(int input);
  // What the W part adds into.
  const Tensor& accumulator(const ParameterUse& use);
  // Runs the node's W part.
  void run_weights();
  ParameterGradients& parameter_gradients() { return grads_; }

 private:
  Tape::State& tape_;
  Node& node_;
  ParameterGradients& grads_;
};

namespace internal {

// Whether an op is recorded; marks its outputs, of which anomaly mode reports
// the first that is not finite.
bool begin(const char* name, absl::Span<const Tensor* const> inputs,
           absl::Span<const Parameter* const> parameters,
           absl::Span<Tensor* const> outputs);
// Puts a node on the current tape, whose inputs are to be set, and the outputs
// behind it.
void finish(Node& node, const char* name, size_t inputs,
            absl::Span<Tensor* const> outputs);
template <class N>
N* add_node(const char* name, size_t inputs,
            absl::Span<Tensor* const> outputs) {
  N* node = new (current_tape()->allocate(sizeof(N))) N;
  finish(*node, name, inputs, outputs);
  return node;
}
// The slot of what `op` uses on a tape, through its captures; 0 where it needs
// no gradient. The tensor is named where it is of another tape.
uint32_t slot_on(const Tape::State& tape, const TapePosition& at,
                 const char* op, const Tensor* x = nullptr);

}  // namespace internal

// Records an op: returns its node to fill in, or null if nothing is recorded.
// Outputs must be fresh handles; those with an integer dtype never require
// grad. Call it after the kernels have run, before the outputs are returned.
template <class N>
N* push(const char* name, absl::Span<const Tensor* const> inputs,
        absl::Span<Tensor* const> outputs,
        absl::Span<const Parameter* const> parameters = {}) {
  if (!internal::begin(name, inputs, parameters, outputs)) return nullptr;
  N* node = internal::add_node<N>(name, inputs.size(), outputs);
  const Tape::State& tape = *internal::current_tape();
  for (size_t i = 0; i < inputs.size(); ++i) {
    node->input_slots[i] = internal::slot_on(tape, *inputs[i], name, inputs[i]);
  }
  return node;
}

// Nodes alive in the process, for leak tests.
int64_t live_nodes();
// Whether a tape of this thread runs backward, a replay's forward included.
bool in_backward();

}  // namespace tapeline
