#include "runtime/device.h"

#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/fake_stream.h"
#include "runtime/tensor.h"

namespace tapeline {
namespace {

TEST(Device, ScopesNestPerThread) {
  Device& shared = Device::current();
  Device a(1), b(2);
  {
    DeviceScope outer(a);
    EXPECT_EQ(&Device::current(), &a);
    {
      DeviceScope inner(b);
      EXPECT_EQ(&Device::current(), &b);
    }
    EXPECT_EQ(&Device::current(), &a);
    std::thread([&] { EXPECT_EQ(&Device::current(), &shared); }).join();
  }
  EXPECT_EQ(&Device::current(), &shared);
}

TEST(Device, ThreadsCanBeChanged) {
  Device device(3);
  EXPECT_EQ(device.threads().threads(), 3);
  device.set_threads(1);
  EXPECT_EQ(device.threads().threads(), 1);
}

TEST(Device, DiesCleanlyWithBlocksWhoseUseIsStillQueued) {
  // The pool asks the stream when it returns the block.
  std::byte scratch[64] = {};
  Device device(1, {.compute = std::make_unique<FakeStream>("compute")});
  const Block block =
      device.pool().allocate(64, Tag::kOther, &device.compute());
  device.compute().copy(block.data, scratch, 64);
  device.pool().free(block, {device.compute().record()});
}

TEST(Device, ADryOneHasNoBytes) {
  Device device(1, {}, /*dry=*/true);
  const DeviceScope scope(device);
  const Tensor x = Tensor::full({1 << 20, 1 << 10}, DType::kF32, 1);
  EXPECT_EQ(device.pool().stats().live, int64_t{1} << 32);
  const Tensor y = Tensor::from<int32_t>({1, 2, 3}, {3});
  EXPECT_EQ(y.to_vector<int32_t>(), (std::vector<int32_t>{0, 0, 0}));
  x.set_zero();
  EXPECT_EQ(x.clone().storage()->bytes(), size_t{1} << 32);
  ASSERT_TRUE(x.storage()->copy_out());
  ASSERT_TRUE(x.storage()->evict());
  EXPECT_EQ(device.pinned().stats().reserved, int64_t{1} << 32);
  x.storage()->load();
}

}  // namespace
}  // namespace tapeline
