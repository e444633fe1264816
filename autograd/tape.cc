#include "autograd/tape.h"

#include <algorithm>
#include <mutex>
#include <ostream>
#include <set>
#include <span>

#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "autograd/anomaly_recorder.h"
#include "autograd/checkpoint.h"
#include "kernels/elementwise/elementwise.h"
#include "runtime/access.h"

namespace tapeline {
namespace {

constexpr size_t kChunkBytes = 1 << 16;
constexpr size_t kKeptChunks = 1024;

constinit thread_local bool backward_runs = false;

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
    slot.position() = {};
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

// Tells when no node before `node` adds to a parameter any more. Only the
// outermost backward does: a replay's tape does not know the other users.
class ReadyEvents {
 public:
  ReadyEvents(const Tape::State& tape, const ParameterGradients& parameters)
      : on_ready_(parameters.on_ready()) {
    if (!on_ready_ || backward_runs || tape.parts == Parts::kInputs) return;
    absl::flat_hash_set<const Parameter::State*> seen;
    for (const auto& use : tape.uses) {
      if (seen.insert(use.first).second) first_uses_.push_back(use);
    }
  }
  void done(size_t node) {
    while (!first_uses_.empty() && first_uses_.back().second >= node) {
      on_ready_(first_uses_.back().first);
      first_uses_.pop_back();
    }
  }

 private:
  const ParameterGradients::OnReady& on_ready_;
  std::vector<std::pair<const Parameter::State*, size_t>> first_uses_;
};

// From the last node to the first. One whose outputs got no gradient has
// nothing to do; one whose W part is to wait keeps its gradients in their slots
// and is not freed.
void run_nodes(Tape::State& tape, ParameterGradients& parameters) {
  const GradModeScope off(GradMode::kOff);
  ReadyEvents ready(tape, parameters);
  const internal::Scoped<bool> running(backward_runs, true);
  for (size_t i = tape.nodes.size(); i-- > 0; ready.done(i)) {
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
  CHECK(internal::recording != this)
      << "tape '" << name << "' ends while it records";
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

void Tape::State::keep(const std::shared_ptr<SavedTensorHooks>& more) {
  // The same few come again and again; the newest is the likeliest.
  if (std::find(hooks.rbegin(), hooks.rend(), more) == hooks.rend()) {
    hooks.push_back(more);
  }
}

Tensor Tape::input(const Tensor& x) {
  CHECK(is_float(x.dtype())) << "[input] no gradient exists for " << x;
  CHECK(!state_->consumed) << "tape '" << name()
                           << "' was already run backward";
  Tensor handle = x;
  handle.position() = {id(), state_->next_slot++, true};
  state_->input_slots.push_back(handle.slot);
  return handle;
}

RecordScope::RecordScope(Tape& tape)
    : tape_(internal::recording, tape.state()) {
  CHECK(!tape.state()->consumed)
      << "tape '" << tape.name() << "' was already run backward";
}

namespace internal {

bool begin(const char* name, absl::Span<const Tensor* const> inputs,
           absl::Span<const Parameter* const> parameters,
           absl::Span<Tensor* const> outputs) {
  if (anomaly_scope != nullptr) check_outputs(name, outputs);
  const GradMode mode = note_op(name, inputs, parameters);
  if (mode == GradMode::kOff) return false;
  bool wanted = false;
  for (const Tensor* input : inputs) wanted |= input->requires_grad;
  for (const Parameter* p : parameters) wanted |= p->trainable();
  if (!wanted) return false;
  for (Tensor* output : outputs) {
    output->requires_grad = is_float(output->dtype());
  }
  if (mode != GradMode::kOn) return false;
  for (const Parameter* p : parameters) recording->note_use(*p);
  return true;
}

void finish(Node& node, const char* name, size_t inputs,
            absl::Span<Tensor* const> outputs) {
  Tape::State& tape = *recording;
  tape.live.store(tape.live + 1, std::memory_order_relaxed);
  node.name = name;
  node.scope = layer_scope();
  node.inputs = static_cast<uint16_t>(inputs);
  node.outputs = static_cast<uint16_t>(outputs.size());
  node.input_slots =
      reinterpret_cast<uint32_t*>(tape.allocate(inputs * sizeof(uint32_t)));
  node.output_slot = tape.next_slot;
  for (Tensor* output : outputs) {
    output->tape = tape.id;
    output->slot = tape.next_slot++;
  }
  if (!outputs.empty()) node.output_shape = outputs[0]->shape();
  tape.nodes.push_back(&node);
}

uint32_t slot_on(const Tape::State& tape, const TapePosition& at,
                 const char* op, const Tensor* x) {
  if (!at.requires_grad) return 0;
  if (at.tape == tape.id) return at.slot;
  const auto captured = tape.captures.find(at);
  CHECK(captured != tape.captures.end())
      << "[" << op << "] a tensor of " << tape_name(at.tape)
      << " is used on tape '" << tape.name << "': " << (x ? *x : Tensor())
      << "; detach() it or mark it with input()";
  return captured->second;
}

}  // namespace internal

void Backward::add(int input, Tensor gradient) {
  const uint32_t slot = node_.input_slots[input];
  if (slot == 0) return;
  if (internal::anomaly_scope != nullptr) {
    internal::check_finite(node_.name, node_.scope, "backward", input,
                           gradient);
  }
  add_to_slot(tape_.slots[slot], std::move(gradient));
}

Tensor Backward::take(int input) {
  const uint32_t slot = node_.input_slots[input];
  return slot == 0 ? Tensor() : std::exchange(tape_.slots[slot], {});
}

const Tensor& Backward::accumulator(const ParameterUse& use) {
  const Tensor& sum = grads_.accumulator(use.parameter, use.site);
  internal::note_sum(sum);
  return sum;
}

void Backward::run_weights() {
  node_.backward_weights(*this);
  internal::check_sums(node_.name, node_.scope);
}

std::vector<Tensor> Tape::backward(const std::vector<Seed>& seeds,
                                   ParameterGradients& grads, Retain retain,
                                   Parts parts) {
  State& tape = *state_;
  CHECK(!tape.consumed) << "tape '" << tape.name
                        << "' was already run backward; keep it with "
                           "Retain::kYes";
  CHECK(tape.slots.empty()) << "tape '" << tape.name << "' is running backward";
  CHECK(parts == Parts::kBoth ||
        (parts == Parts::kInputs && retain == Retain::kNo))
      << "backward of tape '" << tape.name
      << "': a retained tape runs I and W together, and W follows I";
  // Also when a replayed function throws: a retained tape can run again, any
  // other has lost nodes, and W has nothing to go on from.
  bool done = false;
  const absl::Cleanup end = [&] {
    tape.consumed = retain == Retain::kNo;
    if (parts == Parts::kBoth || !done) tape.slots.clear();
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
    const uint32_t slot =
        internal::slot_on(tape, seed.output, "backward", &seed.output);
    add_to_slot(tape.slots[slot], Tensor(seed.grad));
  }
  run_nodes(tape, grads);
  done = true;
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

void Tape::print(std::ostream& out) const {
  for (size_t i = 0; i < state_->nodes.size(); ++i) {
    const Node* node = state_->nodes[i];
    if (node == nullptr) continue;
    out << i << "  " << node->name << "  " << layer_path(node->scope) << "  "
        << node->output_shape << "  saved " << node->saved_bytes << " bytes";
    std::set<std::string> packers;
    for (auto* by = node->packed_by; by != nullptr; by = by->earlier) {
      if (by->handle.words[0] != 0) packers.insert(by->hooks->name());
    }
    if (packers.empty()) packers.insert("none");
    for (const std::string& packer : packers) out << ", by " << packer;
    out << "\n";
  }
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
