// With one GPU: one rank, which makes its group and sums alone. Several ranks
// need as many GPUs.
#include "dist/nccl_communicator.h"

#include <vector>

#include "absl/strings/match.h"
#include "dist/tcp_store.h"
#include "gtest/gtest.h"
#include "runtime/device.h"

namespace tapeline {
namespace {

Launched one_rank() {
  Launched launch;
  launch.store_port = TcpStoreServer::start(0).value()->port();
  return launch;
}

TEST(NcclCommunicator, OneRankMakesItsGroupAndSumsAlone) {
  if (Device::current().kind() != DeviceKind::kCuda) {
    EXPECT_EQ(connect_nccl(one_rank(), {}).status().code(),
              absl::StatusCode::kUnimplemented);
    return;
  }
  const auto made = connect_nccl(one_rank(), {.groups = {{0}}});
  ASSERT_TRUE(made.ok()) << made.status();
  Communicator& c = **made;
  EXPECT_EQ(c.rank(), 0);
  EXPECT_EQ(c.size(), 1);
  const Tensor x = Tensor::from(std::vector<double>{1, 2.5}, {2});
  ASSERT_TRUE(c.all_reduce({"sum", {0}}, x, absl::Seconds(5)).ok());
  EXPECT_EQ(x.to_vector<double>(), (std::vector<double>{1, 2.5}));
  ASSERT_TRUE(c.barrier(absl::Seconds(5)).ok());
  c.set_position(7);
  EXPECT_EQ(c.positions(), std::vector<int64_t>{7});
  // What was not made at the start is not made later.
  const auto sent = c.send({0, 3, 0}, {{DType::kF32, {1}}},
                           {Tensor::zeros({1}, DType::kF32)});
  EXPECT_TRUE(absl::StrContains(sent.status().message(),
                                "no such channel was made at the start"));
  const absl::Status group = c.all_reduce({"sum", {0, 1}}, x, absl::Seconds(5));
  EXPECT_TRUE(absl::StrContains(group.message(), "of ranks 0 1")) << group;
  c.abort(absl::CancelledError("enough"));
  const absl::Status ended = c.barrier(absl::Seconds(5));
  EXPECT_TRUE(absl::StrContains(ended.message(), "enough")) << ended;
  EXPECT_EQ(ended.code(), absl::StatusCode::kCancelled);
}

// A rank that shares its stages with nobody sums alone, in no group.
TEST(NcclCommunicator, OneRankNeedsNoGroup) {
  if (Device::current().kind() != DeviceKind::kCuda) return;
  const auto made = connect_nccl(one_rank(), {});
  ASSERT_TRUE(made.ok()) << made.status();
  const Tensor x = Tensor::from(std::vector<float>{3}, {1});
  ASSERT_TRUE((*made)->all_reduce({"sum", {0}}, x, absl::Seconds(5)).ok());
  EXPECT_EQ(x.to_vector<float>(), std::vector<float>{3});
  EXPECT_TRUE((*made)->barrier(absl::Seconds(5)).ok());
}

}  // namespace
}  // namespace tapeline
