#include "dist/pipeline/executor.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "autograd/ops.h"
#include "autograd/tape.h"
#include "dist/pipeline/generators.h"
#include "dist/pipeline/memory.h"
#include "dist/pipeline/operations.h"
#include "dist/pipeline/testing/micro_model.h"
#include "dist/pipeline/text.h"
#include "gtest/gtest.h"
#include "runtime/device.h"
#include "runtime/device_marks.h"

namespace tapeline {
namespace {

Schedule make(const std::string& name, int p, int m, int v = 0) {
  return with_tied_ends(
      make_schedule(name, {p, v > 0 ? v : default_chunks(name), m}).value());
}

void expect_equal(const Schedule& schedule, const MicroOptions& options = {}) {
  const MicroResult want =
      micro_loop(schedule.stages(), schedule.micro_batches, options);
  EXPECT_EQ(difference(micro_pipeline(schedule, options), want), "");
}

// --- Values

// Two ranks: next is also previous. Each receive is checked for its sender and
// micro-batch by the stage itself.
TEST(Values, B06_TwoRanksWithManyStagesKeepTheirEdgesApart) {
  for (const int v : {2, 3, 4}) {
    for (const ArrivalOrder order :
         {ArrivalOrder::kNewestFirst, ArrivalOrder::kRandom}) {
      MicroOptions options;
      options.threads.order = order;
      options.threads.max_delay = absl::Microseconds(200);
      expect_equal(make("interleaved", 2, 6, v), options);
    }
  }
}

TEST(Values, B05_HandlesThatEndInAnyOrderChangeNothing) {
  for (int seed = 0; seed < 20; ++seed) {
    MicroOptions options;
    options.threads.order = ArrivalOrder::kRandom;
    options.threads.max_delay = absl::Microseconds(400);
    options.threads.seed = static_cast<uint64_t>(seed);
    expect_equal(
        make(seed % 2 == 0 ? "zbv" : "zb1p", 3, 7, seed % 2 == 0 ? 2 : 2),
        options);
  }
}

TEST(Values, B01_UnequalLengthsNeedNoExchangeOfShapes) {
  const Schedule schedule = make("1f1b", 4, 9);
  MicroOptions options;
  options.threads.capacity = 1;
  const MicroResult got = micro_pipeline(schedule, options);
  EXPECT_EQ(difference(got, micro_loop(4, 9, options)), "");
  const std::vector<int> sent = messages_sent(schedule);
  for (int r = 0; r < 4; ++r) EXPECT_EQ(got.counters[r].sent, sent[r]);
}

TEST(Values, B07_FewerMicroBatchesThanRanksRun) {
  for (const std::string& name : schedule_names()) {
    if (name == "dualpipev") continue;  // refuses m below 2p
    for (const int m : {1, 2, 3}) expect_equal(make(name, 4, m));
  }
}

TEST(Values, B12_TiedEndsHaveOneSumOnAnyNumberOfRanks) {
  for (const int p : {1, 2, 4}) {
    for (const char* name : {"1f1b", "interleaved", "zbv"}) {
      const Schedule schedule =
          make(name, p, 4, std::string(name) == "interleaved" ? 2 : 0);
      const MicroResult got = micro_pipeline(schedule);
      const MicroResult want = micro_loop(schedule.stages(), 4);
      EXPECT_EQ(difference(got, want), "");
      int64_t offers = 0;
      for (const ExecutorCounters& c : got.counters) offers += c.offers;
      const bool apart =
          schedule.placement.front() != schedule.placement.back();
      EXPECT_EQ(offers, apart ? 2 : 0);
    }
  }
}

// The head of its own: no group, and the sums differ from tied ones.
TEST(Values, UntiedEndsExchangeNothing) {
  MicroOptions options;
  options.tied = false;
  const Schedule schedule = make_schedule("1f1b", {3, 1, 4}).value();
  const MicroResult got = micro_pipeline(schedule, options);
  EXPECT_EQ(difference(got, micro_loop(3, 4, options)), "");
  EXPECT_NE(got.gradients.at("embedding"),
            micro_loop(3, 4).gradients.at("embedding"));
}

// A weight that is used twice in a stage.
TEST(Values, B32_ASharedWeightCountsOnceUnderISplitFromW) {
  MicroOptions options;
  options.shared_layers = true;
  for (const char* name : {"zb1p", "zbv", "zb_h2"}) {
    expect_equal(make(name, 2, 5), options);
  }
}

// W is found by stage and micro-batch: layers that do not learn skip theirs.
TEST(Values, B33_AStageWithoutWeightsToLearnSkipsItsW) {
  MicroOptions options;
  options.frozen_layers = true;
  for (const char* name : {"zb1p", "zbv", "v_min"}) {
    const Schedule schedule = make(name, 3, 6);
    const MicroResult got = micro_pipeline(schedule, options);
    const MicroResult want = micro_loop(schedule.stages(), 6, options);
    EXPECT_EQ(difference(got, want), "");
    EXPECT_EQ(want.gradients.count("layer1"), 0u);
    EXPECT_GT(got.counters[0].weights, 0);
  }
}

// W of an earlier micro-batch after those of later ones: other order of sums,
// so close, and each found by its key.
TEST(Values, B33_WMayRunInAnyOrder) {
  const Schedule schedule = parse_schedule(
                                "schedule v1 ranks 1 stages 1 micro_batches 3 "
                                "placement 0\n"
                                "rank 0: 0F0 0F1 0F2 0I0 0I1 0I2 0W2 0W0 0W1\n",
                                "test")
                                .value();
  const MicroResult got = micro_pipeline(schedule);
  ASSERT_TRUE(got.status[0].ok());
  const MicroResult want = micro_loop(1, 3);
  EXPECT_EQ(got.losses, want.losses);
  for (const auto& [name, gradient] : want.gradients) {
    for (size_t i = 0; i < gradient.size(); ++i) {
      EXPECT_NEAR(got.gradients.at(name)[i], gradient[i], 1e-6) << name;
    }
  }
}

TEST(Values, B09_OverlappedPairsOfUnequalStages) {
  for (const int m : {4, 5, 9}) expect_equal(make("dualpipev", 2, m));
}

// Gradients are sums: twice the steps on one set of sums is twice the gradient.
TEST(Values, B15_F01_NothingIsDividedByTheNumberOfMicroBatches) {
  MicroOptions options;
  options.equal_lengths = true;
  const MicroResult one = micro_pipeline(make("1f1b", 2, 1), options);
  const MicroResult loop = micro_loop(2, 8, options);
  EXPECT_EQ(difference(micro_pipeline(make("1f1b", 2, 8), options), loop), "");
  double of_one = 0, of_eight = 0;
  for (const float g : one.gradients.at("layer0")) of_one += g * g;
  for (const float g : loop.gradients.at("layer0")) of_eight += g * g;
  EXPECT_GT(of_eight, 4 * of_one);
}

// --- Memory

TEST(Memory, B34_SlotsAreThoseOfThePlan) {
  for (const char* name : {"1f1b", "interleaved", "zb1p", "zbv"}) {
    for (const int m : {8, 32}) {
      const Schedule schedule =
          make(name, 4, m, std::string(name) == "interleaved" ? 2 : 0);
      const auto programs = lower(schedule).value();
      const MicroResult got = micro_pipeline(schedule);
      for (int r = 0; r < 4; ++r) {
        EXPECT_LE(got.counters[r].most_slots, programs[r].slots);
        EXPECT_GT(got.counters[r].most_slots, 0);
      }
    }
  }
}

// Channels hold what is sent, so that bytes do not depend on who is faster.
MicroOptions buffered() {
  MicroOptions options;
  options.equal_lengths = true;
  options.threads.capacity = 1 << 20;
  return options;
}

TEST(Memory, B35_PeakBytesDoNotGrowWithMicroBatches) {
  for (const char* name : {"1f1b", "zb1p", "zbv", "interleaved"}) {
    const int v = std::string(name) == "interleaved" ? 2 : 0;
    const MicroResult few = micro_pipeline(make(name, 4, 8, v), buffered());
    const MicroResult many = micro_pipeline(make(name, 4, 64, v), buffered());
    EXPECT_EQ(few.peak_activations, many.peak_activations) << name;
    // gpipe keeps all.
    if (std::string(name) != "1f1b") continue;
    const MicroResult all = micro_pipeline(make("gpipe", 4, 64), buffered());
    EXPECT_GT(all.peak_activations[3], 8 * many.peak_activations[3]);
  }
}

TEST(Memory, B35_SendersLetGoOfWhatHasLeft) {
  for (const char* name : {"1f1b", "zb1p", "zbv"}) {
    const MicroResult got = micro_pipeline(make(name, 4, 64));
    for (const ExecutorCounters& c : got.counters) {
      EXPECT_GT(c.most_sending, 0);
      EXPECT_LE(c.most_sending, 16) << name << " of " << c.sent;
    }
  }
}

// y = 2 x, which saves nothing.
class DoublingStage : public Stage {
 public:
  static constexpr int64_t kRows = 1000;

  explicit DoublingStage(int stage) : stage_(stage) {}
  std::vector<TensorSpec> inputs(int) const override {
    return stage_ == 0 ? std::vector<TensorSpec>() : specs();
  }
  std::vector<TensorSpec> outputs(int) const override {
    return stage_ == 2 ? std::vector<TensorSpec>() : specs();
  }
  absl::StatusOr<StageOutput> forward(const Pass&,
                                      const std::vector<Tensor>& in) override {
    if (stage_ == 0) {
      return StageOutput{{Tensor::full({kRows}, DType::kF32, 1)}, {}};
    }
    const Tensor y = scale(in[0], 2);
    if (stage_ == 1) return StageOutput{{y}, {}};
    return StageOutput{{}, sum(y)};
  }
  void end(int, bool) override {}

 private:
  static std::vector<TensorSpec> specs() { return {{DType::kF32, {kRows}}}; }
  const int stage_;
};

// --- Times

constexpr absl::Duration kTravels = absl::Milliseconds(5);

// What the last of three ranks hears: every message takes kTravels, from when
// it is waited for or, `early`, from when it is asked for, and then until it is
// there.
class SlowMessages : public Communicator {
 public:
  explicit SlowMessages(bool early) : early_(early) {}
  int rank() const override { return 2; }
  int size() const override { return 3; }
  bool sends_wait() const override { return false; }
  absl::StatusOr<Ticket> send(const Envelope&, const std::vector<TensorSpec>&,
                              std::vector<Tensor>) override {
    return -1;
  }
  absl::StatusOr<Ticket> receive(
      const Envelope&, int, const std::vector<TensorSpec>& specs) override {
    asked_.push_back(specs);
    travels_.emplace_back();
    if (early_) travel(travels_.back());
    return static_cast<Ticket>(asked_.size() - 1);
  }
  absl::StatusOr<std::vector<Tensor>> wait(Ticket ticket,
                                           absl::Duration) override {
    if (ticket < 0) return std::vector<Tensor>();
    const auto i = static_cast<size_t>(ticket);
    if (!early_) travel(travels_[i]);
    last_ = travels_[i];
    std::vector<Tensor> parts;
    for (const TensorSpec& spec : asked_[i]) {
      parts.push_back(Tensor::full(spec.shape, spec.dtype, 1));
    }
    return parts;
  }
  bool done(Ticket) override { return true; }
  void time_messages(DeviceMarks* marks) override {
    if (marks != nullptr) {
      marks_ = marks;
      first_ = travels_.size();
    }
  }
  std::optional<Travel> travel() const override { return last_; }
  absl::Status all_reduce(const Collective&, const Tensor&,
                          absl::Duration) override {
    return absl::OkStatus();
  }
  absl::Status barrier(absl::Duration) override { return absl::OkStatus(); }
  void abort(const absl::Status&) override {}
  void set_position(int64_t) override {}
  std::vector<int64_t> positions() const override { return {0, 0, 0}; }

  // Of all messages of the step timed last.
  double seconds() const {
    double ms = 0;
    for (size_t i = first_; i < travels_.size(); ++i) {
      ms += marks_->ms(travels_[i].end) - marks_->ms(travels_[i].begin);
    }
    return 1e-3 * ms;
  }

 private:
  void travel(Travel& t) {
    t.begin = marks_->mark(Device::current().compute());
    absl::SleepFor(kTravels);
    t.end = marks_->mark(Device::current().compute());
  }
  const bool early_;
  DeviceMarks* marks_ = nullptr;
  size_t first_ = 0;
  std::vector<std::vector<TensorSpec>> asked_;
  std::vector<Travel> travels_;
  std::optional<Travel> last_;
};

struct Timed {
  ExecutorCounters counters;
  double travelled = 0;  // seconds
};

Timed times_of_the_last_rank(bool early) {
  const Schedule schedule = make_schedule("1f1b", {3, 1, 4}).value();
  const std::vector<RankProgram> programs = lower(schedule).value();
  SlowMessages messages(early);
  DoublingStage stage(2);
  Executor executor(schedule, programs, messages, {{2, &stage}});
  ParameterGradients grads;
  // The second step's times are its own.
  for (int step = 0; step < 2; ++step) {
    EXPECT_TRUE(executor.step(grads).ok());
    executor.times();
  }
  return {executor.counters(), messages.seconds()};
}

TEST(Times, AMessageThatIsNeededWhileItTravelsIsExposed) {
  const Timed timed = times_of_the_last_rank(/*early=*/false);
  const ExecutorCounters& c = timed.counters;
  double busy = 0;
  for (const auto& [key, time] : c.passes) {
    EXPECT_EQ(time.passes, 4);
    EXPECT_GT(time.seconds, 0);
    busy += time.seconds;
  }
  EXPECT_GE(timed.travelled, absl::ToDoubleSeconds(4 * kTravels));
  ASSERT_TRUE(c.exposed_seconds);
  EXPECT_NEAR(*c.exposed_seconds, timed.travelled, 1e-9);
  EXPECT_LE(busy + *c.exposed_seconds, c.seconds);
}

// The first one alone travels while the rank has nothing else to wait for; each
// later one is asked for, and there, before the pass of the one before.
TEST(Times, AMessageIsExposedOnlyWhileItsPassIsNext) {
  const Timed timed = times_of_the_last_rank(/*early=*/true);
  ASSERT_TRUE(timed.counters.exposed_seconds);
  EXPECT_GE(*timed.counters.exposed_seconds, absl::ToDoubleSeconds(kTravels));
  EXPECT_LE(*timed.counters.exposed_seconds,
            timed.travelled - absl::ToDoubleSeconds(3 * kTravels));
}

TEST(Times, NothingIsSaidOfMessagesThatTheHostMoves) {
  const MicroResult got = micro_pipeline(make("zb1p", 2, 4));
  for (const ExecutorCounters& c : got.counters) {
    EXPECT_FALSE(c.exposed_seconds);
  }
}

// Of an output the tape keeps the position: eight that are in flight take no
// more than those that are on their way.
TEST(Memory, AnOutputsBytesLeaveWithItsMessage) {
  const Schedule schedule =
      parse_schedule(
          "schedule v1 ranks 3 stages 3 micro_batches 8 placement 0 1 2\n"
          "rank 0: 0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7 0B0 0B1 0B2 0B3 0B4 0B5 0B6 "
          "0B7\n"
          "rank 1: 1F0 1F1 1F2 1F3 1F4 1F5 1F6 1F7 1B0 1B1 1B2 1B3 1B4 1B5 1B6 "
          "1B7\n"
          "rank 2: 2F0 2F1 2F2 2F3 2F4 2F5 2F6 2F7 2B0 2B1 2B2 2B3 2B4 2B5 2B6 "
          "2B7\n",
          "test")
          .value();
  const auto programs = lower(schedule).value();
  ThreadOptions options;
  options.capacity = 100;
  ThreadGroup group(3, options);
  std::vector<int64_t> peaks(3);
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      Device device(1);
      const DeviceScope scope(device);
      DoublingStage stage(r);
      Executor executor(schedule, programs, group.rank(r), {{r, &stage}});
      ParameterGradients grads;
      EXPECT_TRUE(executor.step(grads).ok());
      EXPECT_EQ(executor.counters().most_kept, 8);
      peaks[r] = device.pool().stats().peak;
    });
  }
  for (std::thread& thread : threads) thread.join();
  constexpr int64_t kBytes = 4 * DoublingStage::kRows;
  // What was made, what is asked for, and what the pool rounds up.
  EXPECT_LT(peaks[0], 5 * kBytes);
  EXPECT_LT(peaks[1], 5 * kBytes);
}

// The plan is the program on devices without bytes.
TEST(Memory, PeakBytesAreThoseOfTheDryRun) {
  for (const std::string& name : schedule_names()) {
    for (const int m : {6, 9}) {
      MicroOptions options = buffered();
      options.equal_lengths = false;
      const Schedule schedule = make(name, 3, m, default_chunks(name));
      const MicroResult got = micro_pipeline(schedule, options);
      options.dry = true;
      const MicroResult plan = micro_pipeline(schedule, options);
      EXPECT_EQ(got.peak_activations, plan.peak_activations) << name;
      for (const int64_t bytes : got.peak_activations) EXPECT_GT(bytes, 0);
    }
  }
}

// One that is recomputed or offloaded is there during its backward and, of I
// and W, between them: as the schedule's peaks have it.
TEST(Memory, ParkedPassesCountFromTheirBackwardOn) {
  for (const char* name : {"gpipe", "1f1b", "zb1p", "zbv"}) {
    for (const int kind : {0, 1, 2}) {
      Schedule schedule = make(name, 3, 6);
      for (auto& rank : schedule.ranks) {
        for (Action& action : rank) {
          for (Pass& p : action.passes()) {
            if (!p.is_forward()) continue;
            p.recompute = kind == 0 || (kind == 2 && p.micro_batch % 2 == 0);
            p.offload = kind == 1;
          }
        }
      }
      const MicroResult got = micro_pipeline(schedule);
      EXPECT_EQ(difference(got, micro_loop(schedule.stages(), 6)), "");
      const std::vector<Peak> want = peaks(schedule, {Holds{}});
      for (int r = 0; r < 3; ++r) {
        EXPECT_EQ(static_cast<double>(got.counters[r].most_kept), want[r].value)
            << name << " rank " << r;
      }
    }
  }
}

TEST(Memory, B37_NothingIsLeftOfAMicroBatch) {
  const int64_t nodes = live_nodes();
  for (const char* name : {"1f1b", "zb1p", "zbv", "dualpipev"}) {
    const MicroResult got = micro_pipeline(make(name, 2, 6));
    for (int r = 0; r < 2; ++r) {
      EXPECT_EQ(got.counters[r].nodes_left, 0);
      EXPECT_EQ(got.live_after[r], 0);
    }
  }
  EXPECT_EQ(live_nodes(), nodes);
}

// --- Faults

struct Reports {
  std::mutex mutex;
  std::vector<std::string> all;
  std::function<void(const std::string&)> add() {
    return [this](const std::string& report) {
      const std::lock_guard lock(mutex);
      all.push_back(report);
    };
  }
};

TEST(Watchdog, B13_ALateRankIsReportedAndWaitedFor) {
  MicroOptions options;
  Reports reports;
  options.executor.warn = reports.add();
  options.executor.warn_after = absl::Milliseconds(100);
  options.on_forward = [](int stage, int j) {
    if (stage == 1 && j == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(450));
    }
    return absl::OkStatus();
  };
  expect_equal(make("1f1b", 3, 4), options);
  bool seen = false;
  for (const std::string& report : reports.all) {
    seen |=
        absl::StrContains(report, "rank 1: action 0 of 8 (1F0), in run 1F0");
    EXPECT_TRUE(absl::StrContains(report, "rank 0: "));
    EXPECT_TRUE(absl::StrContains(report, "rank 2: "));
  }
  EXPECT_TRUE(seen) << (reports.all.empty() ? "" : reports.all[0]);
}

TEST(Watchdog, AStalledRankEndsTheStepOfAll) {
  MicroOptions options;
  Reports reports;
  options.executor.warn = reports.add();
  options.executor.warn_after = absl::Milliseconds(50);
  options.executor.deadline = absl::Milliseconds(200);
  std::atomic<bool> stall = true;
  options.on_forward = [&](int stage, int j) {
    if (stage == 2 && j == 1 && stall.exchange(false)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    }
    return absl::OkStatus();
  };
  const MicroResult got = micro_pipeline(make("1f1b", 3, 4), options);
  for (int r = 0; r < 3; ++r) {
    EXPECT_FALSE(got.status[r].ok());
    EXPECT_EQ(got.stages_begun_not_ended[r], 0);
    EXPECT_EQ(got.live_after[r], 0);
    EXPECT_TRUE(absl::StrContains(got.status[r].message(),
                                  "rank 2: action 2 of 8 (2F1), in run 2F1"))
        << got.status[r];
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(got.status[1]));
}

// An error in the middle leaves nothing, and the next step of new communicators
// is whole.
TEST(Failure, LeavesNoState) {
  for (const char* name : {"1f1b", "zb1p", "zbv", "interleaved"}) {
    const Schedule schedule =
        make(name, 3, 5, std::string(name) == "interleaved" ? 2 : 0);
    for (int at = 0; at < schedule.stages() * 5; at += 2) {
      const int64_t nodes = live_nodes();
      MicroOptions options;
      options.threads.order = ArrivalOrder::kRandom;
      options.on_forward = [&](int stage, int j) {
        return stage * 5 + j == at ? absl::UnavailableError("the disk is full")
                                   : absl::OkStatus();
      };
      const MicroResult got = micro_pipeline(schedule, options);
      for (size_t r = 0; r < got.status.size(); ++r) {
        EXPECT_FALSE(got.status[r].ok());
        EXPECT_TRUE(absl::StrContains(got.status[r].message(),
                                      absl::StrCat(at / 5, "F", at % 5)))
            << got.status[r];
        EXPECT_TRUE(
            absl::StrContains(got.status[r].message(), "the disk is full"));
        EXPECT_EQ(got.stages_begun_not_ended[r], 0);
        EXPECT_EQ(got.live_after[r], 0);
      }
      EXPECT_TRUE(got.gradients.empty());
      EXPECT_EQ(live_nodes(), nodes);
    }
  }
}

TEST(Failure, B44_AnotherShapeNamesRankActionAndPeer) {
  MicroOptions options;
  options.on_inputs = [](int stage, std::vector<TensorSpec>& specs) {
    if (stage == 1) specs[0].dtype = DType::kBf16;
  };
  const MicroResult got = micro_pipeline(make("1f1b", 2, 3), options);
  for (int r = 0; r < 2; ++r) {
    EXPECT_FALSE(got.status[r].ok());
    EXPECT_TRUE(absl::StrContains(got.status[r].message(),
                                  "rank 1: receive from rank 0, channel 0, "
                                  "micro-batch 0 expects bf16[4, 4]"))
        << got.status[r];
    EXPECT_TRUE(absl::StartsWith(got.status[r].message(),
                                 absl::StrCat("rank ", r, ", action ")));
  }
}

// The schedule is data: another m is another schedule, nothing is kept.
TEST(Steps, F08_AnotherNumberOfMicroBatchesIsAnotherSchedule) {
  for (const int m : {3, 7, 1, 12}) expect_equal(make("interleaved", 2, m, 2));
}

TEST(Steps, OneExecutorRunsManySteps) {
  for (const char* name : {"1f1b", "zbv"}) {
    MicroOptions options;
    options.steps = 4;
    expect_equal(make(name, 3, 5), options);
  }
}

}  // namespace
}  // namespace tapeline
