#include "runtime/device.h"

#include <thread>

#include "gtest/gtest.h"
#include "runtime/fake_stream.h"

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
  Device device(1, std::make_unique<FakeStream>("compute"));
  const Block block =
      device.pool().allocate(64, Tag::kOther, &device.compute());
  device.compute().copy(block.data, scratch, 64);
  device.pool().free(block, &device.compute(), device.compute().record());
}

}  // namespace
}  // namespace tapeline
