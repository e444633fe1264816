#include "autograd/tape.h"

#include <atomic>
#include <iterator>
#include <mutex>
#include <ostream>

#include "absl/container/flat_hash_map.h"
#include "autograd/anomaly_recorder.h"
#include "autograd/checkpoint_frame.h"
#include "autograd/tape_state.h"
#include "kernels/elementwise/elementwise.h"
#include "runtime/access.h"

namespace tapeline {
namespace {

constexpr size_t kChunkBytes = 1 << 16;
constexpr size_t kKeptChunks = 1024;

thread_local Tape::State* current = nullptr;
thread_local int running_backward = 0;
std::atomic<uint64_t> next_tape_id{1};

// Chunks of finished tapes, for the next ones: a steady step asks the system
// for no memory and touches no page for the first time.
struct FreeChunks {
  std::mutex mutex;
  std::vector<std::unique_ptr<std::byte[]>> chunks;
};
FreeChunks& free_chunks() {
  static FreeChunks& free = *new FreeChunks;
  return free;
}
std::unique_ptr<std::byte[]> take_chunk() {
  FreeChunks& free = free_chunks();
  {
    std::lock_guard lock(free.mutex);
    if (!free.chunks.empty()) {
      auto chunk = std::move(free.chunks.back());
      free.chunks.pop_back();
      return chunk;
    }
  }
  return std::make_unique_for_overwrite<std::byte[]>(kChunkBytes);
}
void give_chunks(std::vector<std::unique_ptr<std::byte[]>> chunks) {
  FreeChunks& free = free_chunks();
  std::lock_guard lock(free.mutex);
  for (auto& chunk : chunks) {
    if (free.chunks.size() == kKeptChunks) break;
    free.chunks.push_back(std::move(chunk));
  }
}

// For the message about a tensor of another tape, and for live_nodes().
struct LiveTapes {
  std::mutex mutex;
  absl::flat_hash_map<uint64_t, const Tape::State*> by_id;
};
LiveTapes& live_tapes() {
  static LiveTapes& live = *new LiveTapes;
  return live;
}
std::string tape_name(uint64_t id) {
  if (id == 0) return "no tape (made in Shadow mode)";
  LiveTapes& live = live_tapes();
  std::lock_guard lock(live.mutex);
  auto found = live.by_id.find(id);
  return found == live.by_id.end() ? "a finished tape"
                                   : "tape '" + found->second->name + "'";
}

uint32_t slot_on(const Tape::State& tape, const TapePosition& at,
                 const char* op, const Tensor& x = {}) {
  if (at.first == tape.id) return at.second;
  const auto captured = tape.captures.find(at);
  CHECK(captured != tape.captures.end())
      << "[" << op << "] a tensor of " << tape_name(at.first)
      << " is used on tape '" << tape.name << "': " << x
      << "; detach() it or mark it with input()";
  return captured->second;
}

// Adds into a slot, rounding after the addition; takes the tensor over when it
// is the only one.
void add_to_slot(Tensor& slot, Tensor&& gradient) {
  if (!slot) {
    slot = std::move(gradient);
    internal::leave_tape(slot);
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

}  // namespace

int64_t live_nodes() {
  LiveTapes& live = live_tapes();
  std::lock_guard lock(live.mutex);
  int64_t nodes = 0;
  for (const auto& [id, tape] : live.by_id) {
    nodes += tape->live.load(std::memory_order_relaxed);
  }
  return nodes;
}

bool in_backward() { return running_backward > 0; }

std::byte* Tape::State::allocate(size_t bytes) {
  bytes = (bytes + 15) / 16 * 16;
  CHECK_LE(bytes, kChunkBytes);
  if (chunks.empty() || used + bytes > kChunkBytes) {
    chunks.push_back(take_chunk());
    used = 0;
  }
  std::byte* at = chunks.back().get() + used;
  used += bytes;
  return at;
}

void Tape::State::free_node(size_t index) {
  if (nodes[index] == nullptr) return;
  std::exchange(nodes[index], nullptr)->~Node();
  live.store(live.load(std::memory_order_relaxed) - 1,
             std::memory_order_relaxed);
}

void Tape::State::retain(const std::shared_ptr<SavedTensorHooks>& wanted) {
  // The same few hooks come again and again; the newest is the likeliest.
  for (size_t i = hooks.size(); i-- > 0;) {
    if (hooks[i] == wanted) return;
  }
  hooks.push_back(wanted);
}

Tape::State::~State() {
  CHECK(current != this) << "tape '" << name << "' ends while it records";
  for (size_t i = nodes.size(); i-- > 0;) free_node(i);
  for (const auto& saved : unowned) {
    if (const auto alive = saved.lock()) alive->reset();
  }
  give_chunks(std::move(chunks));
  LiveTapes& registry = live_tapes();
  std::lock_guard lock(registry.mutex);
  registry.by_id.erase(id);
}

Tape::Tape(std::string name) : state_(std::make_unique<State>()) {
  state_->id = next_tape_id.fetch_add(1);
  state_->name = std::move(name);
  LiveTapes& live = live_tapes();
  std::lock_guard lock(live.mutex);
  live.by_id[state_->id] = state_.get();
}
Tape::~Tape() = default;
Tape::Tape(Tape&&) noexcept = default;
Tape& Tape::operator=(Tape&&) noexcept = default;

const std::string& Tape::name() const { return state_->name; }
uint64_t Tape::id() const { return state_->id; }
int64_t Tape::nodes() const {
  return state_->live.load(std::memory_order_relaxed);
}

Tensor Tape::input(const Tensor& x) {
  CHECK(is_float(x.dtype())) << "[input] no gradient exists for " << x;
  CHECK(!state_->consumed) << "tape '" << name()
                           << "' was already run backward";
  Tensor handle = x.detach();
  handle.requires_grad = true;
  handle.tape = state_->id;
  handle.slot = state_->next_slot++;
  state_->input_slots.push_back(handle.slot);
  return handle;
}

RecordScope::RecordScope(Tape& tape) : previous_(current) {
  CHECK(!tape.state()->consumed)
      << "tape '" << tape.name() << "' was already run backward";
  current = tape.state();
}
RecordScope::~RecordScope() { current = previous_; }

namespace internal {

Tape::State* current_tape() { return current; }

Recording begin(const char* name, std::span<const Tensor* const> inputs,
                std::span<const Parameter* const> parameters,
                std::span<Tensor* const> outputs) {
  if (anomaly_on()) {
    for (size_t i = 0; i < outputs.size(); ++i) {
      check_finite(name, layer_scope(),
                   phase() == Phase::kReplay ? "replay" : "forward",
                   static_cast<int>(i), *outputs[i]);
    }
  }
  GradMode mode = grad_mode();
  FrameScope* const frame = FrameScope::current();
  // Code that turns recording on inside a checkpoint's first run means the
  // replay: here it would put its nodes on the tape around.
  if (mode == GradMode::kOn && frame != nullptr && frame->shadows(current)) {
    mode = GradMode::kShadow;
  }
  if (mode == GradMode::kOff || (mode == GradMode::kOn && current == nullptr)) {
    return Recording::kNo;
  }
  if (frame != nullptr) {
    frame->note_op(name);
    if (mode == GradMode::kShadow) {
      for (const Tensor* input : inputs) frame->note_input(*input);
      for (const Parameter* p : parameters) frame->note_parameter(*p);
    }
  }
  bool wanted = false;
  for (const Tensor* input : inputs) wanted |= input->requires_grad;
  for (const Parameter* p : parameters) wanted |= p->trainable();
  if (!wanted) return Recording::kNo;
  for (Tensor* output : outputs) {
    output->requires_grad = is_float(output->dtype());
  }
  return mode == GradMode::kShadow ? Recording::kShadow : Recording::kYes;
}

void* allocate_node(size_t bytes) { return current->allocate(bytes); }

uint32_t slot_of(const Tensor& x, const char* op) {
  return x.requires_grad ? slot_on(*current, position(x), op, x) : 0;
}
uint32_t slot_at(const TapePosition& at, const char* op) {
  return slot_on(*current, at, op);
}

void finish(Node* node, const char* name, size_t inputs,
            std::span<Tensor* const> outputs) {
  Tape::State& tape = *current;
  tape.live.store(tape.live.load(std::memory_order_relaxed) + 1,
                  std::memory_order_relaxed);
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

}  // namespace internal

void Backward::add(int input, Tensor gradient) {
  const uint32_t slot = node_.input_slots[input];
  if (slot == 0) return;
  if (internal::anomaly_on()) {
    internal::check_finite(node_.name, node_.scope, "backward", input,
                           gradient);
  }
  add_to_slot(tape_.slots[slot], std::move(gradient));
}

const Tensor& Backward::accumulator(const ParameterUse& use) {
  const Tensor& sum = grads_.accumulator(use.parameter(), use.site());
  if (internal::anomaly_on()) added_to_.push_back(sum);
  return sum;
}

Tensor Backward::take(int input) {
  const uint32_t slot = node_.input_slots[input];
  return slot == 0 ? Tensor() : std::exchange(tape_.slots[slot], {});
}

void Backward::run_weights() {
  node_.backward_weights(*this);
  for (size_t i = 0; i < added_to_.size(); ++i) {
    internal::check_finite(node_.name, node_.scope, "weight gradient",
                           static_cast<int>(i), added_to_[i]);
  }
}

namespace {

// Makes the gradients of a node's outputs contiguous; false if none flowed, so
// that the node has nothing to do.
bool ready(std::span<Tensor> gradients) {
  bool any = false;
  for (Tensor& gradient : gradients) {
    if (!gradient) continue;
    any = true;
    if (!gradient.contiguous()) gradient = gradient.clone();
  }
  return any;
}

std::vector<Tensor> sweep(Tape::State& tape, const std::vector<Seed>& seeds,
                          ParameterGradients& parameters, Parts parts,
                          Retain retain) {
  CHECK(!tape.consumed) << "tape '" << tape.name
                        << "' was already run backward; keep it with "
                           "Retain::kYes";
  CHECK(!tape.running) << "tape '" << tape.name << "' is running backward";
  // Also when a replayed function throws: a retained tape can run again, any
  // other has lost nodes.
  struct Running {
    Tape::State& tape;
    Retain retain;
    Running(Tape::State& t, Retain r) : tape(t), retain(r) {
      tape.running = true;
      ++running_backward;
    }
    ~Running() {
      --running_backward;
      tape.slots.clear();
      tape.running = false;
      tape.consumed = retain == Retain::kNo;
    }
  } const running(tape, retain);
  GradModeScope off(GradMode::kOff);
  tape.slots.assign(tape.next_slot, Tensor());
  for (const Seed& seed : seeds) {
    CHECK(seed.output.requires_grad)
        << "backward from " << seed.output << ", which requires no gradient";
    CHECK(seed.grad && seed.grad.shape() == seed.output.shape() &&
          seed.grad.dtype() == seed.output.dtype())
        << "backward from " << seed.output << " with a gradient that is "
        << seed.grad;
    add_to_slot(
        tape.slots[slot_on(tape, internal::position(seed.output), "backward")],
        Tensor(seed.grad));
  }
  if (parts == Parts::kInputs) tape.weight_stash.resize(tape.nodes.size());
  for (size_t i = tape.nodes.size(); i-- > 0;) {
    Node& node = *tape.nodes[i];
    const std::span<Tensor> grads(tape.slots.data() + node.output_slot,
                                  node.outputs);
    bool keep = retain == Retain::kYes;
    if (ready(grads)) {
      const internal::LayerScopeAt scope(node.scope);
      Backward b(tape, node, parameters, grads.data(), retain, parts);
      node.backward_inputs(b);
      if (node.has_weights()) {
        if (parts == Parts::kBoth) {
          b.run_weights();
        } else {
          tape.weight_stash[i].assign(std::make_move_iterator(grads.begin()),
                                      std::make_move_iterator(grads.end()));
          keep = true;
        }
      }
      for (Tensor& gradient : grads) gradient = Tensor();
    }
    if (!keep) tape.free_node(i);
  }
  std::vector<Tensor> inputs;
  for (uint32_t slot : tape.input_slots) {
    Tensor& gradient = tape.slots[slot];
    inputs.push_back(!gradient || gradient.contiguous() ? std::move(gradient)
                                                        : gradient.clone());
  }
  return inputs;
}

Tensor ones_like(const Tensor& loss) {
  CHECK_EQ(loss.elements(), 1) << "a loss is one number, got " << loss << "; ";
  return Tensor::full(loss.shape(), loss.dtype(), 1.0);
}

}  // namespace

std::vector<Tensor> Tape::backward(const std::vector<Seed>& seeds,
                                   ParameterGradients& grads, Retain retain) {
  return sweep(*state_, seeds, grads, Parts::kBoth, retain);
}

std::vector<Tensor> Tape::backward(const Tensor& loss,
                                   ParameterGradients& grads, Retain retain) {
  return backward({{loss, ones_like(loss)}}, grads, retain);
}

std::vector<Tensor> Tape::backward_inputs(const std::vector<Seed>& seeds,
                                          ParameterGradients& grads) {
  return sweep(*state_, seeds, grads, Parts::kInputs, Retain::kNo);
}

void Tape::backward_weights(ParameterGradients& grads) {
  State& tape = *state_;
  CHECK(!tape.weight_stash.empty() || tape.nodes.empty())
      << "backward_weights of tape '" << tape.name
      << "' before its backward_inputs";
  GradModeScope off(GradMode::kOff);
  struct Running {
    Running() { ++running_backward; }
    ~Running() { --running_backward; }
  } const running;
  for (size_t i = tape.weight_stash.size(); i-- > 0;) {
    if (tape.weight_stash[i].empty()) continue;
    Node& node = *tape.nodes[i];
    const internal::LayerScopeAt scope(node.scope);
    Backward b(tape, node, grads, tape.weight_stash[i].data(), Retain::kNo,
               Parts::kInputs);
    b.run_weights();
    tape.weight_stash[i].clear();
    tape.free_node(i);
  }
  tape.weight_stash.clear();
}

void Tape::print(std::ostream& out) const {
  for (size_t i = 0; i < state_->nodes.size(); ++i) {
    const Node* node = state_->nodes[i];
    if (node == nullptr) continue;
    out << i << "  " << node->name << "  " << layer_path(node->scope) << "  "
        << node->output_shape << "  saved " << node->saved_bytes << " bytes\n";
  }
}

}  // namespace tapeline
