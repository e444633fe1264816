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

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "autograd/mode.h"
#include "runtime/check.h"
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
// Of the innermost checkpoint that runs; kOriginal outside.
Phase phase();

// Since the process began: replays run, values read from stashes, ops whose
// kernels a replay did not run.
struct CheckpointCounters {
  int64_t replays = 0, stash_reads = 0, kept_ops = 0;
};
CheckpointCounters checkpoint_counters();

namespace internal {

// The function with its types erased, for replays.
class CheckpointBody {
 public:
  virtual ~CheckpointBody() = default;
  // Tensors of the input, undefined by now: the node saves them.
  virtual std::vector<Tensor*> inputs() = 0;
  // The output's tensors.
  virtual std::vector<Tensor> run(std::vector<Tensor> inputs) = 0;
};

// A first run, from its construction to finish(): in Shadow mode, with a frame.
// Without finish() it leaves nothing.
class FirstRun {
 public:
  FirstRun(const RecomputePolicy& policy, std::unique_ptr<CheckpointBody> body);
  ~FirstRun();
  FirstRun(const FirstRun&) = delete;
  FirstRun& operator=(const FirstRun&) = delete;
  // Puts the node on the tape and the outputs behind it.
  void finish(const std::vector<Tensor*>& outputs);

 private:
  struct State;
  std::unique_ptr<State> state_;
};
// Is something recorded, or would it be?
bool records();

// The next kept value of the frame that runs, or null if it is to be made: then
// keep_stash() follows. `type` has to be the same on a replay.
bool stashing();
std::shared_ptr<void> next_stash(const std::type_info& type);
void keep_stash(std::shared_ptr<void> value, const std::type_info& type,
                const std::vector<Tensor*>& tensors);
// A stashed function is one thing: what is inside it is none of the frame's.
class FrameSuspended {
 public:
  FrameSuspended();
  ~FrameSuspended();
  FrameSuspended(const FrameSuspended&) = delete;
  FrameSuspended& operator=(const FrameSuspended&) = delete;

 private:
  void* suspended_;
};

// Runs `make`, which writes an op's outputs, or takes what was kept of them.
bool take_kept(const char* op, std::initializer_list<Tensor*> outputs);
void keep_outputs(const char* op, std::initializer_list<Tensor*> outputs);
template <class F>
void make_outputs(const char* op, std::initializer_list<Tensor*> outputs,
                  F&& make) {
  if (take_kept(op, outputs)) return;
  make();
  keep_outputs(op, outputs);
}
// All ops of its scope are kept.
class KeepScope {
 public:
  KeepScope();
  ~KeepScope();
  KeepScope(const KeepScope&) = delete;
  KeepScope& operator=(const KeepScope&) = delete;

 private:
  bool previous_ = false;
};

template <class Tree>
std::vector<Tensor*> tensors_of(Tree& tree) {
  std::vector<Tensor*> out;
  visit_leaves(tree, [&](auto& leaf) {
    static_assert(std::is_same_v<decltype(leaf), Tensor&>,
                  "a checkpoint's inputs and outputs are tensors");
    out.push_back(&leaf);
  });
  return out;
}

template <class F, class In, class... Context>
class TypedBody : public CheckpointBody {
 public:
  TypedBody(F& fn, const In& in, Context&... context)
      : fn_(fn), context_(context...), in_(in) {}

  std::vector<Tensor*> inputs() override { return tensors_of(in_); }
  std::vector<Tensor> run(std::vector<Tensor> inputs) override {
    In in = in_;
    size_t i = 0;
    for (Tensor* x : tensors_of(in)) *x = std::move(inputs[i++]);
    auto out = std::apply(
        [&](auto&... c) { return fn_(std::as_const(in), c...); }, context_);
    std::vector<Tensor> outputs;
    for (Tensor* y : tensors_of(out)) outputs.push_back(std::move(*y));
    return outputs;
  }

 private:
  F& fn_;
  std::tuple<Context&...> context_;
  In in_;
};

}  // namespace internal

template <class F, class In, class... Context>
auto checkpoint(const RecomputePolicy& policy, F& fn, const In& in,
                Context&... context) {
  using Out =
      std::remove_cvref_t<std::invoke_result_t<F&, const In&, Context&...>>;
  if (!policy.recompute || !internal::records()) return Out(fn(in, context...));
  internal::FirstRun run(
      policy, std::make_unique<internal::TypedBody<F, In, Context...>>(
                  fn, in, context...));
  Out out = fn(in, context...);
  run.finish(internal::tensors_of(out));
  return out;
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
    const internal::FrameSuspended suspended;
    return f();
  };
  if (!internal::stashing()) return make();
  if (std::shared_ptr<void> kept = internal::next_stash(typeid(T))) {
    return *static_cast<T*>(kept.get());
  }
  auto value = std::make_shared<T>(make());
  internal::keep_stash(value, typeid(T), internal::tensors_of(*value));
  return *value;
}

template <class F>
auto keep(F&& f) -> std::invoke_result_t<F> {
  const internal::KeepScope all;
  return f();
}

template <class F>
void once(F&& f) {
  if (phase() == Phase::kOriginal) f();
}

}  // namespace tapeline
