// Memory over many steps of lengths that vary: what is reserved in the first
// two steps serves all others, and nothing waits.
//
// Counted below the product: the linker puts __wrap_aligned_alloc in the place
// of the call that both pools get their memory from, and streams count who
// makes the host wait.
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <random>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "autograd/offload.h"
#include "autograd/tape.h"
#include "gtest/gtest.h"
#include "models/batch.h"
#include "models/mla_lm.h"
#include "runtime/device.h"
#include "runtime/fake_stream.h"
#include "tests/training/random_models.h"
#include "tools/train/language_model.h"
#include "tools/train/trainer.h"

namespace {
std::atomic<int64_t> system_calls{0};
}

extern "C" {
void* __real_aligned_alloc(size_t alignment, size_t bytes);
void* __wrap_aligned_alloc(size_t alignment, size_t bytes) {
  ++system_calls;
  return __real_aligned_alloc(alignment, bytes);
}
}

namespace tapeline {
namespace {

// An event is a value: making one creates nothing.
static_assert(std::is_trivially_copyable_v<Event>);

// Times the host waits for a stream.
struct Waits {
  int64_t host = 0;
  // Kernels run on the host's thread, so a wait of the compute stream is one
  // of the thread too, but none that the program asked for.
  int inside_compute = 0;
};

class ComputeStream : public CpuStream {
 public:
  explicit ComputeStream(Waits& waits) : CpuStream("compute"), waits_(waits) {}
  void wait(const Event& event) override {
    ++waits_.inside_compute;
    CpuStream::wait(event);
    --waits_.inside_compute;
  }
  void synchronize(const Event& event) override {
    waits_.host += waits_.inside_compute == 0;
    CpuStream::wait(event);
  }

 private:
  Waits& waits_;
};

class CopyStream : public FakeStream {
 public:
  CopyStream(const char* name, Waits& waits)
      : FakeStream(name), waits_(waits) {}
  void synchronize(const Event& event) override {
    waits_.host += waits_.inside_compute == 0;
    FakeStream::synchronize(event);
  }

 private:
  Waits& waits_;
};

// What must not change from step to step.
struct Measured {
  int64_t nodes, storages, live, reserved, pinned, leased;
  int64_t system_calls;  // by the pools
  int64_t host_waits;
  bool operator==(const Measured&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Measured& m) {
  return out << "nodes " << m.nodes << ", storages " << m.storages << ", live "
             << m.live << " of " << m.reserved << " bytes, pinned " << m.leased
             << " of " << m.pinned << " bytes, " << m.system_calls
             << " system calls, " << m.host_waits << " waits";
}

constexpr int kSteps = 50;
constexpr int64_t kLongest = 192;

// The first two steps are of the longest batches, the others of any.
int64_t length(int64_t step, int64_t micro_batch) {
  if (step <= 2) return kLongest;
  std::mt19937 random(static_cast<uint32_t>(2 * step + micro_batch));
  return 3 + static_cast<int64_t>(random() % (kLongest - 2));
}

HostBatch batch(int64_t step, int64_t micro_batch) {
  const int64_t tokens = length(step, micro_batch);
  HostBatch out;
  for (int64_t t = 0; t < tokens; ++t) {
    out.ids.push_back(static_cast<int32_t>(t * t % 40));
    out.labels.push_back(static_cast<int32_t>((t + 1) % 40));
  }
  out.cu_seqlens = {0, static_cast<int32_t>(tokens / 3),
                    static_cast<int32_t>(tokens)};
  return out;
}

// Wide enough that pinned memory is more than a page.
RandomModel wide_model() {
  Draw d(3);
  Features features;
  RandomModel model = ModelDeck(d, features).next();
  model.json["hidden_size"] = 64;
  model.json["num_nextn_predict_layers"] = 1;
  model.mtp_depths = 1;
  model.train_indexer = true;
  return model;
}

class FlatMemory : public testing::Test {
 protected:
  FlatMemory()
      : device_(1, {std::make_unique<ComputeStream>(waits_),
                    std::make_unique<CopyStream>("copy_out", waits_),
                    std::make_unique<CopyStream>("copy_in", waits_)}),
        scope_(device_) {}

  Measured measure() {
    const PoolStats pool = device_.pool().stats();
    const PoolStats pinned = device_.pinned().stats();
    EXPECT_EQ(system_calls - calls_before_,
              pool.system_allocations + pinned.system_allocations)
        << "the wrapper counts what the linker does";
    return {live_nodes(),    Storage::live(), pool.live,    pool.reserved,
            pinned.reserved, pinned.live,     system_calls, waits_.host};
  }
  // Runs the steps; from the third on nothing changes.
  void expect_flat(const std::function<void(int64_t)>& step, bool waits) {
    Measured want = {};
    std::set<int64_t> lengths;
    for (int64_t i = 1; i <= kSteps; ++i) {
      step(i);
      lengths.insert(length(i, 0));
      Measured now = measure();
      if (waits) now.host_waits = 0;
      if (i == 2) want = now;
      if (i > 2) {
        EXPECT_EQ(now, want) << "step " << i << ", lengths " << length(i, 0)
                             << " and " << length(i, 1);
      }
    }
    EXPECT_GT(lengths.size(), 20u);
    EXPECT_GT(want.pinned, 100'000);
    EXPECT_EQ(want.leased, 0);
    EXPECT_EQ(want.nodes, 0);
  }

  const int64_t calls_before_ = system_calls;
  Waits waits_;
  Device device_;
  DeviceScope scope_;
};

// Two micro-batches in flight. The graph outlives the tape.
class Passes {
 public:
  explicit Passes(bool backward) : backward_(backward) {
    initialize(model_.named_tensors(), DType::kF32, /*seed=*/7,
               /*normal_std=*/0.1);
    model_.apply_training_choices();
  }
  void step(int64_t number) {
    const std::vector<HostBatch> hosts = {batch(number, 0), batch(number, 1)};
    const Denominators n = count_targets(hosts, 1);
    grads_.zero();
    InFlight flight[2];
    for (size_t m = 0; m < 2; ++m) forward(hosts[m], n, flight[m]);
    if (!backward_) return;
    for (InFlight& pass : flight) {
      pass.tape.backward(pass.total, grads_);
      EXPECT_EQ(pass.graph->status(), absl::OkStatus());
      EXPECT_GT(pass.graph->counters().copied_bytes, 0);
    }
  }

 private:
  struct InFlight {
    std::unique_ptr<OffloadGraph> graph;
    Batch batch;
    Context ctx;
    Tensor total;
    Tape tape;
  };
  void forward(const HostBatch& host, const Denominators& n, InFlight& pass) {
    pass.ctx.sequence = Sequence::packed(host.cu_seqlens);
    pass.ctx.weights = {.balance = 0.01, .z = 0.001, .indexer = 0.1};
    pass.ctx.recompute.assign(static_cast<size_t>(model_.c->total_layers()),
                              true);
    pass.ctx.recompute[1] = false;
    pass.ctx.keep = {"linear"};
    pass.ctx.drop_norms = true;
    pass.graph = std::make_unique<OffloadGraph>(
        plan_windows(model_.layer_calls(static_cast<int64_t>(host.ids.size())),
                     {true, true, {}}),
        /*strict=*/true);
    pass.ctx.offload = pass.graph.get();
    model_.prepare(pass.ctx);
    pass.batch = make_batch(host, n, 0.3, DType::kF32);
    pass.total = record(
        pass.tape, [&] { return model_.loss(pass.batch, pass.ctx).total; });
  }

  const bool backward_;
  MlaLm model_{std::make_shared<const MlaLmConfig>(wide_model().config())};
  ParameterGradients grads_;
};

// F0 F1 B0 B1, or backward never runs. The host waits for nothing.
TEST_F(FlatMemory, PassesReuseWhatTheFirstTwoStepsReserved) {
  for (const bool backward : {true, false}) {
    SCOPED_TRACE(backward);
    Passes passes(backward);
    expect_flat(
        [&](int64_t step) {
          passes.step(step);
          if (step == 2) device_.pool().settle();
        },
        /*waits=*/false);
  }
}

// With an optimizer, which reads numbers for the log.
TEST_F(FlatMemory, SoDoStepsOfATrainer) {
  const RandomModel drawn = wide_model();
  const std::unique_ptr<LanguageModel> model =
      make_language_model(
          drawn.json,
          {.mtp_depths = 1, .indexer = IndexerTraining::kSelectedKeys})
          .value();
  initialize(model->named_tensors(), DType::kF32, /*seed=*/7,
             /*normal_std=*/0.1);
  model->apply_training_choices();
  TrainerOptions options;
  options.micro_batches = 2;
  options.loss = {.balance = 0.01, .indexer = 0.1, .router_bias_rate = 0.01};
  options.learning_rate.lr = 1e-3;
  options.recompute.assign(static_cast<size_t>(model->layers()), true);
  options.offload = {true, true, {}};
  options.strict_offload = true;
  Trainer trainer(*model, options, batch);
  expect_flat([&](int64_t) { trainer.step(/*hash=*/false); }, /*waits=*/true);
  EXPECT_EQ(trainer.offload_status(), absl::OkStatus());
}

}  // namespace
}  // namespace tapeline
