#include "autograd/tape.h"

#include <algorithm>
#include <mutex>

#include "absl/cleanup/cleanup.h"
#include "autograd/anomaly_recorder.h"
#include "autograd/checkpoint.h"
#include "kernels/elementwise/elementwise.h"
#include "runtime/access.h"

namespace tapeline {
namespace {

constexpr size_t kChunkBytes = 1 << 16;
constexpr size_t kKeptChunks = 1024;

thread_local Tape::State* current = nullptr;
thread_local bool backward_runs = false;

// What the tapes of a process share.
struct Shared {
  std::mutex mutex;
  uint64_t last_id = 0;
  // For the message about a tensor of another tape, and for live_nodes().
  absl::flat_hash_map<uint64_t, const Tape::State*> tapes;
  // Of finished tapes, for the next ones: a steady step asks the system for no
  // memory and touches no page for the first time.
  std::vector<std::unique_ptr<std::byte[]>> chunks;
};
Shared& shared() {
  static Shared& all = *new Shared;
  return all;
}

std::string tape_name(uint64_t id) {
  if (id == 0) return "no tape (made in Shadow mode)";
  const std::lock_guard lock(shared().mutex);
  const auto found = shared().tapes.find(id);
  return found == shared().tapes.end() ? "a finished tape"
                                       : "tape '" + found->second->name + "'";
}

void make_contiguous(Tensor& x) {
  if (x && !x.contiguous()) x = x.clone();
}

// Adds into a slot, rounding after the addition; takes the tensor over when it
// is the only one.
void add_to_slot(Tensor& slot, Tensor&& gradient) {
  if (!slot) {
    slot = std::move(gradient);
    internal::set_position(slot, {});
    return;
  }
  CHECK(slot.shape() == gradient.shape() && slot.dtype() == gradient.dtype())
      << "gradients of one tensor differ: " << slot << " and " << gradient;
  dispatch_float(slot.dtype(), [&]<class T>() {
    if (slot.storage().use_count() == 1 && slot.contiguous()) {
      accumulate(launch(), read<T>(gradient).view(), write<T>(slot).view());
      return;
    }
    Tensor sum = Tensor::empty(slot.shape(), slot.dtype());
    add(launch(), read<T>(slot).view(), read<T>(gradient).view(),
        write<T>(sum).view());
    slot = std::move(sum);
  });
}

// From the last node to the first. One whose outputs got no gradient has
// nothing to do; one whose W part is to wait keeps its gradients in their slots
// and is not freed.
void run_nodes(Tape::State& tape, ParameterGradients& parameters) {
  const GradModeScope off(GradMode::kOff);
  const internal::Scoped<bool> running(backward_runs, true);
  for (size_t i = tape.nodes.size(); i-- > 0;) {
    if (tape.nodes[i] == nullptr) continue;
    Node& node = *tape.nodes[i];
    const std::span grads(tape.slots.data() + node.output_slot, node.outputs);
    bool reached = false;
    for (Tensor& gradient : grads) {
      make_contiguous(gradient);
      reached |= static_cast<bool>(gradient);
    }
    if (reached) {
      const internal::LayerScopeAt scope(node.scope);
      Backward b(tape, node, parameters);
      if (tape.parts != Parts::kWeights) node.backward_inputs(b);
      if (node.has_weights()) {
        if (tape.parts == Parts::kInputs) continue;
        b.run_weights();
      }
      for (Tensor& gradient : grads) gradient = Tensor();
    }
    if (tape.retain == Retain::kNo) tape.free_node(i);
  }
}

}  // namespace

int64_t live_nodes() {
  const std::lock_guard lock(shared().mutex);
  int64_t nodes = 0;
  for (const auto& [id, tape] : shared().tapes) nodes += tape->live;
  return nodes;
}

bool in_backward() { return backward_runs; }

Tape::State::State(std::string of) : name(std::move(of)) {
  const std::lock_guard lock(shared().mutex);
  id = ++shared().last_id;
  shared().tapes[id] = this;
}

Tape::State::~State() {
  CHECK(current != this) << "tape '" << name << "' ends while it records";
  for (size_t i = nodes.size(); i-- > 0;) free_node(i);
  for (const auto& saved : unowned) {
    if (const auto alive = saved.lock()) alive->reset();
  }
  const std::lock_guard lock(shared().mutex);
  shared().tapes.erase(id);
  for (auto& chunk : chunks) {
    if (shared().chunks.size() == kKeptChunks) break;
    shared().chunks.push_back(std::move(chunk));
  }
}

std::byte* Tape::State::allocate(size_t bytes) {
  bytes = (bytes + 15) / 16 * 16;
  CHECK_LE(bytes, kChunkBytes);
  if (chunks.empty() || used + bytes > kChunkBytes) {
    const std::lock_guard lock(shared().mutex);
    auto& free = shared().chunks;
    if (free.empty()) free.emplace_back(new std::byte[kChunkBytes]);
    chunks.push_back(std::move(free.back()));
    free.pop_back();
    used = 0;
  }
  return chunks.back().get() + std::exchange(used, used + bytes);
}

void Tape::State::free_node(size_t index) {
  if (nodes[index] == nullptr) return;
  std::exchange(nodes[index], nullptr)->~Node();
  live.store(live - 1, std::memory_order_relaxed);
}

Tensor Tape::input(const Tensor& x) {
  CHECK(is_float(x.dtype())) << "[input] no gradient exists for " << x;
  CHECK(!state_->consumed) << "tape '" << name()
                           << "' was already run backward";
  Tensor handle = x.detach();
  internal::set_position(handle, {id(), state_->next_slot++});
  state_->input_slots.push_back(handle.slot);
  return handle;
}

RecordScope::RecordScope(Tape& tape) : tape_(current, tape.state()) {
  CHECK(!tape.state()->consumed)
      << "tape '" << tape.name() << "' was already run backward";
}

namespace internal {

Tape::State* current_tape() { return current; }

bool begin(const char* name, std::span<const Tensor* const> inputs,
           std::span<const Parameter* const> parameters,
           std::span<Tensor* const> outputs) {
  check_outputs(name, outputs);
  const GradMode mode = note_op(name, inputs, parameters);
  if (mode == GradMode::kOff) return false;
  bool wanted = false;
  for (const Tensor* input : inputs) wanted |= input->requires_grad;
  for (const Parameter* p : parameters) wanted |= p->trainable();
  if (!wanted) return false;
  for (Tensor* output : outputs) {
    output->requires_grad = is_float(output->dtype());
  }
  return mode == GradMode::kOn;
}

void finish(Node* node, const char* name, size_t inputs,
            std::span<Tensor* const> outputs) {
  Tape::State& tape = *current;
  tape.live.store(tape.live + 1, std::memory_order_relaxed);
  node->name = name;
  node->scope = layer_scope();
  node->inputs = static_cast<uint16_t>(inputs);
  node->outputs = static_cast<uint16_t>(outputs.size());
  node->input_slots =
      reinterpret_cast<uint32_t*>(tape.allocate(inputs * sizeof(uint32_t)));
  node->output_slot = tape.next_slot;
  for (Tensor* output : outputs) {
    output->tape = tape.id;
    output->slot = tape.next_slot++;
  }
  if (!outputs.empty()) node->output_shape = outputs[0]->shape();
  tape.nodes.push_back(node);
}

uint32_t slot_on(const Tape::State& tape, const TapePosition& at,
                 const char* op, const Tensor& x) {
  if (at.first == tape.id) return at.second;
  const auto captured = tape.captures.find(at);
  CHECK(captured != tape.captures.end())
      << "[" << op << "] a tensor of " << tape_name(at.first)
      << " is used on tape '" << tape.name << "': " << x
      << "; detach() it or mark it with input()";
  return captured->second;
}

}  // namespace internal

void Backward::add(int input, Tensor gradient) {
  const uint32_t slot = node_.input_slots[input];
  if (slot == 0) return;
  internal::check_finite(node_.name, node_.scope, "backward", input, gradient);
  add_to_slot(tape_.slots[slot], std::move(gradient));
}

Tensor Backward::take(int input) {
  const uint32_t slot = node_.input_slots[input];
  return slot == 0 ? Tensor() : std::exchange(tape_.slots[slot], {});
}

const Tensor& Backward::accumulator(const ParameterUse& use) {
  const Tensor& sum = grads_.accumulator(use.parameter(), use.site());
  internal::note_sum(sum);
  return sum;
}

void Backward::run_weights() {
  node_.backward_weights(*this);
  internal::check_sums(node_.name, node_.scope);
}

std::vector<Tensor> Tape::sweep(const std::vector<Seed>& seeds,
                                ParameterGradients& grads, Parts parts,
                                Retain retain) {
  State& tape = *state_;
  CHECK(!tape.consumed) << "tape '" << tape.name
                        << "' was already run backward; keep it with "
                           "Retain::kYes";
  CHECK(tape.slots.empty()) << "tape '" << tape.name << "' is running backward";
  // Also when a replayed function throws: a retained tape can run again, any
  // other has lost nodes.
  const absl::Cleanup end = [&] {
    tape.consumed = retain == Retain::kNo;
    if (parts == Parts::kBoth) tape.slots.clear();
  };
  tape.parts = parts;
  tape.retain = retain;
  tape.slots.assign(tape.next_slot, Tensor());
  for (const Seed& seed : seeds) {
    CHECK(seed.output.requires_grad)
        << "backward from " << seed.output << ", which requires no gradient";
    CHECK(seed.grad && seed.grad.shape() == seed.output.shape() &&
          seed.grad.dtype() == seed.output.dtype())
        << "backward from " << seed.output << " with a gradient that is "
        << seed.grad;
    const TapePosition at = internal::position(seed.output);
    add_to_slot(tape.slots[internal::slot_on(tape, at, "backward")],
                Tensor(seed.grad));
  }
  run_nodes(tape, grads);
  std::vector<Tensor> inputs;
  for (const uint32_t slot : tape.input_slots) {
    make_contiguous(tape.slots[slot]);
    inputs.push_back(std::move(tape.slots[slot]));
  }
  return inputs;
}

std::vector<Tensor> Tape::backward(const Tensor& loss,
                                   ParameterGradients& grads, Retain retain) {
  CHECK_EQ(loss.elements(), 1) << "a loss is one number, got " << loss << "; ";
  const Tensor one = Tensor::full(loss.shape(), loss.dtype(), 1.0);
  return backward({{loss, one}}, grads, retain);
}

void Tape::backward_weights(ParameterGradients& grads) {
  CHECK((state_->consumed && !state_->slots.empty()) || state_->nodes.empty())
      << "backward_weights of tape '" << name()
      << "' before its backward_inputs";
  state_->parts = Parts::kWeights;
  run_nodes(*state_, grads);
  state_->slots.clear();
}

}  // namespace tapeline
