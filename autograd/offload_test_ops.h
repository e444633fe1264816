// What tests of offload, kept and dropped outputs share.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "autograd/checkpoint.h"
#include "autograd/dropped_outputs.h"
#include "autograd/memory_plan.h"
#include "autograd/offload.h"
#include "autograd/ops.h"
#include "autograd/tape.h"
#include "autograd/test_ops.h"
#include "runtime/device.h"
#include "runtime/fake_stream.h"
#include "runtime/tensor.h"

namespace tapeline::test_ops {

// What a copy stream was told, in order of issue.
struct IssuedCopy {
  std::string stream;
  const std::byte* to;
  const std::byte* from;
  size_t bytes;
};

class LoggedStream : public FakeStream {
 public:
  LoggedStream(std::string name, std::vector<IssuedCopy>& log)
      : FakeStream(std::move(name)), log_(log) {}
  void copy(void* to, const void* from, size_t bytes) override {
    log_.push_back({name(), static_cast<std::byte*>(to),
                    static_cast<const std::byte*>(from), bytes});
    FakeStream::copy(to, from, bytes);
  }

 private:
  std::vector<IssuedCopy>& log_;
};

// The current device while it lives: kernels run at once, copies only when
// somebody waits for them, and memory nobody owns is NaN.
class CopyDevice {
 public:
  CopyDevice()
      : device_(1, {std::make_unique<CpuStream>("compute"),
                    std::make_unique<LoggedStream>("out", log_),
                    std::make_unique<LoggedStream>("in", log_)}),
        scope_(device_) {
    device_.pool().set_poison(true);
  }
  Device* operator->() { return &device_; }
  FakeStream& out() { return static_cast<FakeStream&>(device_.copy_out()); }
  FakeStream& in() { return static_cast<FakeStream&>(device_.copy_in()); }
  const std::vector<IssuedCopy>& log() const { return log_; }
  void finish_copies() {
    out().synchronize(out().record());
    in().synchronize(in().record());
  }

 private:
  std::vector<IssuedCopy> log_;
  Device device_;
  DeviceScope scope_;
};

// y = x; keeps `kept` and shows backward's part of it to `see`.
using See = std::function<void(const std::vector<Tensor>&)>;
struct HoldNode : Node {
  std::unique_ptr<SavedTensor[]> saved;
  size_t count = 0;
  See see;
  void backward_inputs(Backward& b) override {
    std::vector<Tensor> kept;
    for (size_t i = 0; i < count; ++i) kept.push_back(saved[i].unpack());
    if (see) see(kept);
    b.add(0, b.grad());
  }
};
inline Tensor hold(const Tensor& x, const std::vector<Tensor>& kept,
                   See see = nullptr) {
  Tensor y = x.clone();
  if (auto* n = push<HoldNode>("hold", {&x}, {&y})) {
    n->saved = std::make_unique<SavedTensor[]>(kept.size());
    n->count = kept.size();
    n->see = std::move(see);
    for (size_t i = 0; i < kept.size(); ++i) n->saved[i].save(kept[i]);
  }
  return y;
}

// Layers 0, 1, ... whose windows list so many bytes of activations.
inline std::vector<PlannedWindow> windows_of(
    const std::vector<int64_t>& activation_bytes) {
  std::vector<LayerCall> calls;
  for (size_t i = 0; i < activation_bytes.size(); ++i) {
    calls.push_back({static_cast<int>(i), activation_bytes[i], 0, -1});
  }
  return plan_windows(calls, {true, false, {}});
}

inline OffloadChoice all_inputs() { return {true, false, {}}; }

// Keeps tensors in host memory of its own: nothing of them is left.
struct TakesAway : SavedTensorHooks {
  struct Away {
    std::vector<float> values;
    Shape shape;
  };
  std::vector<std::unique_ptr<Away>> away;
  int unpacked = 0, dropped = 0;
  SavedHandle pack(Tensor& kept) override {
    if (kept.dtype() != DType::kF32) return {};
    away.push_back(
        std::make_unique<Away>(Away{kept.to_vector<float>(), kept.shape()}));
    kept = Tensor();
    return {{away.size(), 0}};
  }
  Tensor unpack(SavedHandle handle, const Tensor& kept) override {
    if (handle.words[0] == 0) return kept;
    ++unpacked;
    const Away& from = *away[handle.words[0] - 1];
    return Tensor::from(from.values, from.shape);
  }
  void drop(SavedHandle handle) override { dropped += handle.words[0] != 0; }
};

// Sees every tensor that is packed, and in which phase.
struct Watch : SavedTensorHooks {
  std::vector<uint64_t> storages;
  std::vector<Phase> packed, unpacked;
  int dropped = 0;
  SavedHandle pack(Tensor& tensor) override {
    storages.push_back(tensor.storage()->id());
    packed.push_back(phase());
    return {{1, 0}};
  }
  Tensor unpack(SavedHandle, const Tensor& kept) override {
    unpacked.push_back(phase());
    return kept;
  }
  void drop(SavedHandle) override { ++dropped; }
};

// Blocks in a row, each the call of a window, as the layers of a model are.
class Stack {
 public:
  static constexpr int kWidth = 64;
  struct Options {
    OffloadChoice offload;
    bool recompute = false, strict = true, drop_norms = false;
    std::vector<std::string> keep = {};
    std::function<void(int)> on_run = nullptr;  // of a layer
  };
  // One forward pass. The graph outlives the tape.
  struct Pass {
    OffloadGraph graph;
    Options options;
    Tape tape;
    Tensor x, loss;
    std::vector<StoragePtr> inputs;  // of layers
  };
  using Result = std::vector<std::vector<float>>;

  explicit Stack(int layers) {
    for (int i = 0; i < layers; ++i) {
      blocks_.push_back({*this,
                         i,
                         {parameter("norm", noise({kWidth}, 2 * i))},
                         parameter("w", noise({kWidth, kWidth}, 2 * i + 1))});
    }
  }

  std::unique_ptr<Pass> forward(const Options& options, int rows = 16,
                                int seed = 100) {
    std::vector<LayerCall> calls;
    for (const Block& block : blocks_) {
      calls.push_back({block.layer, rows * kWidth * 4, 0, -1});
    }
    std::unique_ptr<Pass> pass(
        new Pass{{plan_windows(calls, options.offload), options.strict},
                 options,
                 Tape(),
                 Tensor(),
                 Tensor(),
                 {}});
    running_ = &pass->options;
    pass->x = pass->tape.input(noise({rows, kWidth}, seed));
    pass->loss = record(pass->tape, [&] {
      Tensor h = scale(pass->x, 1.1);
      for (Block& block : blocks_) {
        const LayerScope scope("layers", block.layer);
        pass->inputs.push_back(h.storage());
        const OffloadWindow window(&pass->graph, block.layer, {h}, {});
        h = checkpoint(RecomputePolicy(options.recompute, options.keep), block,
                       h);
      }
      return sum(h);
    });
    return pass;
  }
  Result backward(Pass& pass, ParameterGradients& grads,
                  Retain retain = Retain::kNo) {
    running_ = &pass.options;
    Result out = {pass.loss.to_vector<float>()};
    out.push_back(
        pass.tape.backward(pass.loss, grads, retain)[0].to_vector<float>());
    return out;
  }
  void add_gradients(ParameterGradients& grads, Result& out) {
    for (const Block& block : blocks_) {
      out.push_back(grads.combined(block.norm.weight).to_vector<float>());
      out.push_back(grads.combined(block.w).to_vector<float>());
    }
  }
  // Forward, backward and everything that came out of it.
  Result run(const Options& options, int rows = 16) {
    ParameterGradients grads;
    const std::unique_ptr<Pass> pass = forward(options, rows);
    Result out = backward(*pass, grads);
    add_gradients(grads, out);
    return out;
  }

 private:
  struct Norm {
    Parameter weight;
    Tensor operator()(const Tensor& x) const {
      return rms_norm(x, weight, 1e-5);
    }
  };
  struct Block {
    Stack& stack;
    int layer;
    Norm norm;
    Parameter w;
    Tensor operator()(const Tensor& x) const {
      const Options& options = *stack.running_;
      if (options.on_run) options.on_run(layer);
      DroppedOutputs dropped(options.drop_norms);
      return x + mul(linear(dropped(norm, x), w), scale(x, 0.5));
    }
  };
  static Tensor noise(const Shape& shape, int seed) {
    std::vector<float> v(static_cast<size_t>(shape.elements()));
    for (size_t i = 0; i < v.size(); ++i) {
      v[i] = 0.1f *
             std::sin(static_cast<float>(seed) + 1.7f * static_cast<float>(i));
    }
    return Tensor::from(v, shape);
  }

  std::vector<Block> blocks_;
  const Options* running_ = nullptr;
};

// Compares also what is not a number.
inline bool same_bits(const std::vector<std::vector<float>>& a,
                      const std::vector<std::vector<float>>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].size() != b[i].size() ||
        std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float)) !=
            0) {
      return false;
    }
  }
  return true;
}

}  // namespace tapeline::test_ops
