// checkpoint: forgets what a function saves and makes it again in backward.
//
//   x = checkpoint(recompute, layer, x, ctx);      // layer(x, ctx)
//
// The function runs once without recording (Shadow mode), and one node takes
// its place on the tape. Backward replays it on a local tape, with gradients
// going to the caller's sums in the order they would have without checkpoint:
// the bits are the same. (One tensor given twice in the output is two outputs,
// whose gradients are added last.)
//
// Inputs and outputs are trees of tensors (runtime/tree.h). Gradients flow to
// the tensors of `in` and to tensors that the function captured; parameters
// get theirs directly. The node exists if an output requires grad: there is no
// special case for detached inputs or frozen blocks. Saved inputs go through
// the hooks around the call. Integer outputs are passed on as they are.
//
// `fn` and `context` are taken by reference and live until the tape is done (a
// lambda inside a loop's body does not). The function is a function of inputs,
// captures, parameters and context as they were: a tensor, stashed value or
// parameter that was written since, another output structure or other ops on
// the replay are a CHECK that names the layer. Checkpoints nest. Hooks around
// the call see what the node saves; those around backward what a replay saves.
// When a function throws in a retained tape's replay, the tape can run again
// with gradients zeroed.
//
//   stash(f)   what a replay must not decide again (selected keys, chosen
//              experts): f runs once without grad, the value is kept, and a
//              replay gets the same value. Outside of a checkpoint just f().
//   keep(f)    selective recompute: the outputs of the ops in f are kept, so a
//              replay does not run their kernels again. They go through the
//              same hooks as the inputs. A policy keeps ops by name.
//   once(f)    side effects (counters, statistics): not on a replay.
//
// Per thread, like the tape. Source: contracts of checkpoint by replay as in
// Chen et al. 2016 (arXiv 1604.06174) and PyTorch's reentrant checkpoint.
#pragma once

#include <any>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "autograd/tape.h"
#include "runtime/tensor.h"
#include "runtime/tree.h"

namespace tapeline {

// Whether a call is recomputed, and the ops (keepable_ops() of ops.h) whose
// outputs its replay takes over instead of making them again.
struct RecomputePolicy {
  RecomputePolicy(bool on, std::vector<std::string> ops = {})
      : recompute(on), keep(std::move(ops)) {}
  bool recompute = false;
  std::vector<std::string> keep;
};

enum class Phase : uint8_t { kOriginal, kReplay };
// Of the innermost checkpoint that runs; outside kOriginal, but for dropped
// outputs that are made again.
Phase phase();

// Since the process began: replays run, values read from stashes, ops whose
// kernels a replay did not run.
struct CheckpointCounters {
  int64_t replays = 0, stash_reads = 0, kept_ops = 0;
};
CheckpointCounters checkpoint_counters();

namespace internal {

// A function and its input, for replays, with their types erased.
struct CheckpointBody {
  virtual ~CheckpointBody() = default;
  // The input's tensors, which the node packs.
  virtual std::vector<Tensor*> inputs() = 0;
  // Runs the function with these in their place; returns the output's.
  virtual std::vector<Tensor> run(std::vector<Tensor> in) = 0;
};

// Runs a function in Shadow mode, noting what it uses, and puts a node with its
// body on the tape and the outputs behind it. If it throws, it leaves nothing.
void first_run(const RecomputePolicy& policy,
               const std::vector<const Tensor*>& inputs,
               absl::FunctionRef<std::vector<Tensor*>()> run,
               absl::FunctionRef<std::unique_ptr<CheckpointBody>()> make_body);
// The run on this thread of a checkpointed function; null in what it stashes:
// that is one thing, and what is inside of it is none of the run's.
class CheckpointRun;
inline constinit thread_local CheckpointRun* running = nullptr;
// What recording an op means now. In a first run there is no tape: code that
// turns recording on there means the replay.
inline GradMode op_mode() {
  if (grad_mode() != GradMode::kOn || current_tape() != nullptr) {
    return grad_mode();
  }
  return running != nullptr ? GradMode::kShadow : GradMode::kOff;
}
// Is something recorded, and not by a replay?
inline bool records_original() {
  return op_mode() == GradMode::kOn && phase() == Phase::kOriginal;
}
// Whether bytes that were dropped are made again (dropped_outputs.h), which is
// a replay too.
inline constinit thread_local bool refilling = false;
// Whether the run keeps the outputs of all ops.
inline constinit thread_local bool keeps_all = false;

// The op of whoever looks (observer.h), which no replay has to repeat.
inline constexpr char kObserveOp[] = "observe";
// The tape's side: an op is about to be recorded. The run that is inside of a
// checkpoint notes it, and in Shadow mode what it uses. Returns what recording
// it means.
GradMode note_op(const char* op, absl::Span<const Tensor* const> inputs,
                 absl::Span<const Parameter* const> parameters);
// Runs `make`, which writes an op's outputs, or takes what was kept of them.
void make_outputs(const char* op, absl::Span<Tensor* const> outputs,
                  absl::FunctionRef<void()> make);
// The run's next stashed value, of the same type as in the first run; null if
// it is to be made: then keep_stash() follows.
const std::any* next_stash(const std::type_info& type);
void keep_stash(std::any value, const std::vector<const Tensor*>& tensors);

template <class Tree>
auto tensors_of(Tree& tree) {
  using T = std::conditional_t<std::is_const_v<Tree>, const Tensor, Tensor>;
  size_t count = 0;
  visit_leaves(tree, [&](T&) { ++count; });
  std::vector<T*> out;
  out.reserve(count);
  visit_leaves(tree, [&](T& leaf) { out.push_back(&leaf); });
  return out;
}

template <class F, class In>
struct TypedBody : CheckpointBody {
  TypedBody(const F& f, const In& from) : function(f), in(from) {}
  std::vector<Tensor*> inputs() override { return tensors_of(in); }
  std::vector<Tensor> run(std::vector<Tensor> tensors) override {
    In now = in;
    auto from = tensors.begin();
    for (Tensor* x : tensors_of(now)) *x = std::move(*from++);
    auto out = function(now);
    std::vector<Tensor> outputs;
    for (Tensor* y : tensors_of(out)) outputs.push_back(std::move(*y));
    return outputs;
  }

  F function;
  In in;
};

}  // namespace internal

template <class F, class In, class... Context>
auto checkpoint(const RecomputePolicy& policy, F& fn, const In& in,
                Context&... context) {
  using Out =
      std::remove_cvref_t<std::invoke_result_t<F&, const In&, Context&...>>;
  const auto function = [&fn, &... rest = context](const In& x) -> Out {
    return fn(x, rest...);
  };
  using Body = internal::TypedBody<decltype(function), In>;
  if (!policy.recompute || internal::op_mode() == GradMode::kOff) {
    return function(in);
  }
  std::optional<Out> out;
  internal::first_run(
      policy, internal::tensors_of(in),
      [&] { return internal::tensors_of(out.emplace(function(in))); },
      [&] { return std::make_unique<Body>(function, in); });
  return *std::move(out);
}

// A temporary would be gone when backward needs it.
template <class F, class In, class... Context>
auto checkpoint(const RecomputePolicy& policy, const F&& fn, const In& in,
                Context&... context) = delete;

template <class F>
auto stash(F&& f) -> std::invoke_result_t<F> {
  using T = std::invoke_result_t<F>;
  const auto make = [&] {
    const GradModeScope off(GradMode::kOff);
    const internal::Scoped suspended(internal::running, {});
    return f();
  };
  if (internal::running == nullptr) return make();
  if (const std::any* kept = internal::next_stash(typeid(T))) {
    return std::any_cast<const T&>(*kept);
  }
  const T value = make();
  internal::keep_stash(value, internal::tensors_of(value));
  return value;
}

template <class F>
auto keep(F&& f) -> std::invoke_result_t<F> {
  const internal::Scoped<bool> all(internal::keeps_all, true);
  return f();
}

template <class F>
void once(F&& f) {
  if (phase() == Phase::kOriginal) f();
}

}  // namespace tapeline
