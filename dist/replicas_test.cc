// What replicas of a pipeline tell each other: texts, groups, sums of
// gradients.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "dist/all_gather.h"
#include "dist/gradient_reducer.h"
#include "dist/mesh.h"
#include "dist/subgroup.h"
#include "dist/thread_communicator.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(30);

void on_ranks(ThreadGroup& group, int ranks,
              const std::function<void(Communicator&)>& run) {
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] { run(group.rank(r)); });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(AllGather, TextsOfAnyLengthReachEveryRank) {
  const std::vector<std::string> texts = {
      "", "seven!!", "eight...", "nine.....", std::string("\0x\xff", 3)};
  const int ranks = static_cast<int>(texts.size());
  ThreadGroup group(ranks);
  on_ranks(group, ranks, [&](Communicator& c) {
    const auto got = all_gather(c, "texts", texts[c.rank()], kTimeout);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(*got, texts);
    const auto nothing = all_gather(c, "nothing", "", kTimeout);
    ASSERT_TRUE(nothing.ok()) << nothing.status();
    EXPECT_EQ(*nothing, std::vector<std::string>(texts.size()));
  });
}

TEST(Subgroup, HasRanksOfItsOwn) {
  ThreadGroup group(4);
  const MeshPoint mesh = {.pp = 2, .dp = 2};
  on_ranks(group, 4, [&](Communicator& whole) {
    Subgroup stages(whole, group_of(mesh, whole.rank(), {Axis::kPipeline}));
    Subgroup replicas(whole, group_of(mesh, whole.rank(), {Axis::kData}));
    EXPECT_EQ(stages.rank(), whole.rank() / 2);
    EXPECT_EQ(replicas.rank(), whole.rank() % 2);
    EXPECT_EQ(stages.size(), 2);
    std::vector<double> sum = {1.0 * whole.rank()};
    ASSERT_TRUE(all_reduce(stages, "stages", sum, kTimeout).ok());
    EXPECT_EQ(sum[0], whole.rank() % 2 == 0 ? 2 : 4);
    sum = {1.0 * whole.rank()};
    ASSERT_TRUE(all_reduce(replicas, "replicas", sum, kTimeout).ok());
    EXPECT_EQ(sum[0], whole.rank() < 2 ? 1 : 5);
    // To the other stage of the same replica.
    const int other = 1 - stages.rank();
    const std::vector<TensorSpec> spec = {{DType::kF32, {1}}};
    const auto sent = stages.send(
        {other, 0, 0}, spec,
        {Tensor::from(std::vector<float>{1.0F * whole.rank()}, {1})});
    const auto asked = stages.receive({other, 0, 0}, 0, spec);
    ASSERT_TRUE(sent.ok() && asked.ok());
    const auto got = stages.wait(*asked, kTimeout);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ((*got)[0].to_vector<float>()[0], (whole.rank() + 2) % 4);
    ASSERT_TRUE(stages.wait(*sent, kTimeout).ok());
    whole.set_position(whole.rank());
    ASSERT_TRUE(stages.barrier(kTimeout).ok());
    EXPECT_EQ(stages.positions()[stages.rank()], whole.rank());
  });
}

// Numbers whose sum depends on the order in which they are added.
std::vector<float> rough_values(int rank, int bucket, int64_t n) {
  std::mt19937 random(static_cast<uint32_t>(rank * 100 + bucket));
  std::vector<float> out;
  for (int64_t i = 0; i < n; ++i) {
    out.push_back(std::ldexp(static_cast<float>(random() % 4096) - 2048,
                             static_cast<int>(random() % 30)));
  }
  return out;
}

// Sizes that no number of replicas divides, fewer elements than replicas, and
// none at all.
TEST(GradientReducer, B46_AddsInTheOrderOfRanksWhateverTheSizes) {
  const std::vector<std::vector<int64_t>> buckets = {
      {7, 1, 130}, {1}, {}, {2, 0, 3}, {64}};
  for (const int ranks : {1, 2, 3, 5}) {
    for (const ArrivalOrder order :
         {ArrivalOrder::kOldestFirst, ArrivalOrder::kRandom}) {
      SCOPED_TRACE(ranks);
      ThreadGroup group(
          ranks,
          {.order = order, .max_delay = absl::Milliseconds(2), .seed = 5});
      bool order_matters = false;
      on_ranks(group, ranks, [&](Communicator& c) {
        GradientReducer reducer(c, kTimeout);
        for (int step = 0; step < 2; ++step) {
          std::vector<std::vector<Tensor>> sums;
          for (size_t b = 0; b < buckets.size(); ++b) {
            sums.emplace_back();
            for (size_t i = 0; i < buckets[b].size(); ++i) {
              const int64_t n = buckets[b][i];
              sums.back().push_back(Tensor::from(
                  rough_values(c.rank(), static_cast<int>(10 * b + i), n),
                  {n}));
            }
            ASSERT_TRUE(reducer.begin(static_cast<int>(b), sums.back()).ok());
          }
          ASSERT_TRUE(reducer.finish().ok());
          for (size_t b = 0; b < buckets.size(); ++b) {
            for (size_t i = 0; i < buckets[b].size(); ++i) {
              const int64_t n = buckets[b][i];
              const auto of = [&](int rank) {
                return rough_values(rank, static_cast<int>(10 * b + i), n);
              };
              std::vector<float> want = of(0), backward = of(ranks - 1);
              for (int r = 1; r < ranks; ++r) {
                const auto more = of(r), less = of(ranks - 1 - r);
                for (int64_t k = 0; k < n; ++k) {
                  want[k] += more[k];
                  backward[k] += less[k];
                }
              }
              EXPECT_EQ(sums[b][i].to_vector<float>(), want);
              if (c.rank() == 0 && want != backward) order_matters = true;
            }
          }
        }
        // Of an even cut each replica sends 2 (n-1)/n of the bytes.
        EXPECT_LE(reducer.counters().sent_bytes, 2 * 2 * 208 * 4);
        EXPECT_EQ(reducer.counters().sent_bytes > 0, ranks > 1);
      });
      EXPECT_TRUE(group.status().ok()) << group.status();
      // Otherwise the test would not see another order.
      EXPECT_EQ(order_matters, ranks > 2);
    }
  }
}

// A replica's passes go on while its gradients travel.
TEST(GradientReducer, BeginWaitsForNobody) {
  ThreadGroup group(2);
  std::atomic<bool> begun = false;
  on_ranks(group, 2, [&](Communicator& c) {
    GradientReducer reducer(c, kTimeout);
    const Tensor x = Tensor::from(std::vector<float>{1, 2, 3}, {3});
    if (c.rank() == 1) {
      // Rank 0 returns from begin() although this one has not.
      while (!begun) std::this_thread::yield();
    }
    ASSERT_TRUE(reducer.begin(0, {x}).ok());
    begun = true;
    ASSERT_TRUE(reducer.finish().ok());
    EXPECT_EQ(x.to_vector<float>(), (std::vector<float>{2, 4, 6}));
  });
}

TEST(GradientReducer, ALostReplicaIsAnError) {
  ThreadGroup group(2);
  on_ranks(group, 2, [&](Communicator& c) {
    if (c.rank() == 1) return;
    GradientReducer reducer(c, absl::Milliseconds(50));
    ASSERT_TRUE(
        reducer.begin(0, {Tensor::from(std::vector<float>{1, 2}, {2})}).ok());
    const absl::Status status = reducer.finish();
    EXPECT_TRUE(absl::StrContains(status.message(), "from rank 1")) << status;
    c.abort(status);
  });
}

}  // namespace
}  // namespace tapeline
