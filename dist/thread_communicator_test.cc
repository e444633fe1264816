#include "dist/thread_communicator.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "runtime/access.h"
#include "runtime/device.h"

namespace tapeline {
namespace {

constexpr absl::Duration kLong = absl::Seconds(20);
constexpr absl::Duration kShort = absl::Milliseconds(20);

// Runs f(communicator) on a thread and a device for each rank.
void on_ranks(ThreadGroup& group, int ranks,
              const std::function<void(Communicator&)>& f) {
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      Device device(1);
      const DeviceScope scope(device);
      f(group.rank(r));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::vector<TensorSpec> floats(int64_t n) { return {{DType::kF32, {n}}}; }
Tensor filled(float value, int64_t n = 3) {
  return Tensor::full({n}, DType::kF32, value);
}

TEST(Messages, ArriveInTheReceiversBufferWhateverTheOrder) {
  for (const ArrivalOrder order :
       {ArrivalOrder::kOldestFirst, ArrivalOrder::kNewestFirst,
        ArrivalOrder::kRandom}) {
    for (const int capacity : {-1, 1, 2}) {
      ThreadOptions options;
      options.order = order;
      options.max_delay = absl::Microseconds(300);
      if (capacity >= 0) options.capacity = capacity;
      ThreadGroup group(2, options);
      on_ranks(group, 2, [&](Communicator& c) {
        const int peer = 1 - c.rank();
        std::vector<Communicator::Ticket> asked, sent;
        for (int channel = 0; channel < 4; ++channel) {
          asked.push_back(
              c.receive({peer, channel, 7}, channel, floats(3)).value());
        }
        for (int channel = 3; channel >= 0; --channel) {
          const float value = static_cast<float>(10 * c.rank() + channel);
          sent.push_back(
              c.send({peer, channel, 7}, floats(3), {filled(value)}).value());
        }
        for (int channel = 0; channel < 4; ++channel) {
          const auto parts = c.wait(asked[channel], kLong);
          ASSERT_TRUE(parts.ok()) << parts.status();
          const float want = static_cast<float>(10 * peer + channel);
          EXPECT_EQ((*parts)[0].to_vector<float>(),
                    std::vector<float>(3, want));
        }
        for (const auto ticket : sent) EXPECT_TRUE(c.wait(ticket, kLong).ok());
      });
      EXPECT_TRUE(group.status().ok());
    }
  }
}

TEST(Messages, AChannelIsAQueue) {
  ThreadOptions options;
  options.order = ArrivalOrder::kNewestFirst;
  ThreadGroup group(2, options);
  on_ranks(group, 2, [&](Communicator& c) {
    std::vector<Communicator::Ticket> sent;
    for (int j = 0; j < 5; ++j) {
      const float value = static_cast<float>(j);
      if (c.rank() == 0) {
        sent.push_back(c.send({1, 0, j}, floats(3), {filled(value)}).value());
      } else {
        const auto ticket = c.receive({0, 0, j}, 0, floats(3)).value();
        EXPECT_EQ(c.wait(ticket, kLong).value()[0].to_vector<float>()[0],
                  value);
      }
    }
    for (const auto ticket : sent) EXPECT_TRUE(c.wait(ticket, kLong).ok());
  });
}

TEST(Messages, AnAbsentPartStaysAbsent) {
  ThreadGroup group(2);
  on_ranks(group, 2, [&](Communicator& c) {
    const std::vector<TensorSpec> two = {{DType::kF32, {3}},
                                         {DType::kI32, {1}}};
    if (c.rank() == 0) {
      const auto ticket =
          c.send({1, 0, 0}, two, {Tensor(), Tensor::from<int32_t>({5}, {1})})
              .value();
      EXPECT_TRUE(c.wait(ticket, kLong).ok());
      return;
    }
    const auto parts = c.wait(c.receive({0, 0, 0}, 0, two).value(), kLong);
    ASSERT_TRUE(parts.ok());
    EXPECT_FALSE((*parts)[0]);
    EXPECT_EQ((*parts)[1].to_vector<int32_t>()[0], 5);
  });
}

// Of a buffer that nobody else holds nothing can be read after its release; one
// that is held keeps its bytes.
TEST(Messages, TheSendersBufferIsPoisonedOnRelease) {
  ThreadGroup group(2);
  on_ranks(group, 2, [&](Communicator& c) {
    if (c.rank() == 1) {
      for (const int j : {0, 1}) {
        const auto t = c.receive({0, 0, j}, 0, floats(3)).value();
        EXPECT_EQ(c.wait(t, kLong).value()[0].to_vector<float>()[0], 4);
      }
      return;
    }
    Tensor x = filled(4);
    const std::byte* bytes = nullptr;
    {
      const auto in = read<float>(x);
      bytes = reinterpret_cast<const std::byte*>(in.view().data);
    }
    const auto held = c.send({1, 0, 0}, floats(3), {x}).value();
    ASSERT_TRUE(c.wait(held, kLong).ok());
    EXPECT_EQ(x.to_vector<float>()[0], 4);
    const auto last = c.send({1, 0, 1}, floats(3), {std::move(x)}).value();
    x = Tensor();
    ASSERT_TRUE(c.wait(last, kLong).ok());
    // The pool still has the block.
    float now = 0;
    std::memcpy(&now, bytes, sizeof(now));
    EXPECT_TRUE(std::isnan(now));
  });
}

TEST(Capacity, ASenderWaitsForRoom) {
  for (const int capacity : {0, 1, 3}) {
    ThreadOptions options;
    options.capacity = capacity;
    ThreadGroup group(2, options);
    on_ranks(group, 2, [&](Communicator& c) {
      if (c.rank() == 1) {
        ASSERT_TRUE(c.barrier(kLong).ok());
        for (int j = 0; j <= capacity; ++j) {
          const auto t = c.receive({0, 0, j}, 0, floats(3)).value();
          EXPECT_TRUE(c.wait(t, kLong).ok());
        }
        return;
      }
      for (int j = 0; j < capacity; ++j) {
        const auto t = c.send({1, 0, j}, floats(3), {filled(1)}).value();
        EXPECT_TRUE(c.wait(t, kLong).ok()) << j;
      }
      const auto t = c.send({1, 0, capacity}, floats(3), {filled(1)}).value();
      const auto early = c.wait(t, kShort);
      EXPECT_TRUE(absl::IsDeadlineExceeded(early.status()));
      EXPECT_TRUE(absl::StrContains(early.status().message(),
                                    "rank 0: send to rank 1, channel 0"))
          << early.status();
      ASSERT_TRUE(c.barrier(kLong).ok());
      EXPECT_TRUE(c.wait(t, kLong).ok());
    });
  }
}

TEST(Errors, AMessageOfAnotherShapeOrNumberEndsBothRanks) {
  struct Case {
    std::vector<TensorSpec> expected;
    int micro_batch;
    const char* what;
  };
  const Case cases[] = {
      {floats(4), 0, "expects f32[4], but rank 0 sent micro-batch 0, f32[3]"},
      {{{DType::kBf16, {3}}}, 0, "expects bf16[3], but rank 0 sent"},
      {floats(3), 2, "micro-batch 2 expects f32[3], but rank 0 sent micro-ba"},
      {{}, 0, "but rank 0 sent micro-batch 0, f32[3]"},
  };
  for (const Case& of : cases) {
    ThreadGroup group(2);
    on_ranks(group, 2, [&](Communicator& c) {
      absl::Status status;
      if (c.rank() == 0) {
        const auto ticket = c.send({1, 6, 0}, floats(3), {filled(1)});
        status =
            ticket.ok() ? c.wait(*ticket, kLong).status() : ticket.status();
      } else {
        const auto ticket = c.receive({0, 6, of.micro_batch}, 0, of.expected);
        status =
            ticket.ok() ? c.wait(*ticket, kLong).status() : ticket.status();
      }
      EXPECT_TRUE(absl::StrContains(status.message(), of.what)) << status;
      EXPECT_TRUE(absl::StrContains(status.message(),
                                    "rank 1: receive from rank 0, channel 6"))
          << status;
      c.abort(status);
    });
  }
}

TEST(Errors, AbortEndsEverybodysWaits) {
  ThreadGroup group(3);
  on_ranks(group, 3, [&](Communicator& c) {
    if (c.rank() == 2) {
      c.abort(absl::UnavailableError("rank 2: gone"));
      return;
    }
    const auto ticket = c.receive({2, 0, 0}, 0, floats(1));
    const absl::Status status =
        ticket.ok() ? c.wait(*ticket, kLong).status() : ticket.status();
    EXPECT_EQ(status.message(), "rank 2: gone");
    EXPECT_EQ(c.barrier(kLong).message(), "rank 2: gone");
    c.abort(status);
  });
  EXPECT_EQ(group.status().message(), "rank 2: gone");
}

// ((a + b) + c) in rank order, whoever comes first.
TEST(AllReduce, AddsInTheOrderOfRanks) {
  const std::vector<float> of = {1.0f, 1e8f, -1e8f};  // another order: 1
  const float want = (of[0] + of[1]) + of[2];
  for (int round = 0; round < 20; ++round) {
    ThreadGroup group(3);
    on_ranks(group, 3, [&](Communicator& c) {
      std::this_thread::sleep_for(
          std::chrono::microseconds((c.rank() * 7 + round * 5) % 3 * 300));
      const Tensor x = filled(of[c.rank()]);
      for (int k = 0; k < 2; ++k) {
        const Tensor y = x.clone();
        ASSERT_TRUE(c.all_reduce({"sum", {0, 1, 2}}, y, kLong).ok());
        EXPECT_EQ(y.to_vector<float>()[0], want);
      }
    });
  }
}

TEST(Trap, B11_ACollectiveIsEnteredByItsMembersAlone) {
  ThreadGroup group(3);
  on_ranks(group, 3, [&](Communicator& c) {
    const Tensor x = filled(1);
    const absl::Status status = c.all_reduce({"loss", {0, 1}}, x, kLong);
    if (c.rank() != 2) return;  // their sum may be made before
    EXPECT_TRUE(absl::StrContains(
        status.message(),
        "rank 2: collective 'loss' of ranks 0 1: this rank is none of them"))
        << status;
  });
  EXPECT_FALSE(group.status().ok());
}

TEST(Trap, B10_MembersAgreeOnWhoTheyAre) {
  ThreadGroup group(2);
  on_ranks(group, 2, [&](Communicator& c) {
    const Tensor x = filled(1);
    const std::vector<int> ranks =
        c.rank() == 0 ? std::vector<int>{0, 1} : std::vector<int>{1};
    const absl::Status status = c.all_reduce({"loss", ranks}, x, kShort);
    if (c.rank() == 0) {
      EXPECT_FALSE(status.ok());
    }
  });
}

TEST(Trap, B12_AGroupEnteredByOneSideSaysWhoIsMissing) {
  ThreadGroup group(2);
  on_ranks(group, 2, [&](Communicator& c) {
    if (c.rank() == 1) return;
    const absl::Status status =
        c.all_reduce({"tied", {0, 1}}, filled(1), kShort);
    EXPECT_TRUE(absl::StrContains(status.message(),
                                  "collective 'tied', without rank 1"))
        << status;
  });
}

}  // namespace
}  // namespace tapeline
