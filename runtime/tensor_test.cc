#include "runtime/tensor.h"

#include <cmath>
#include <cstring>
#include <numeric>
#include <sstream>

#include "gtest/gtest.h"
#include "runtime/access.h"
#include "runtime/fake_device.h"

namespace tapeline {
namespace {

Tensor counted(const Shape& shape) {
  std::vector<float> values(static_cast<size_t>(shape.elements()));
  std::iota(values.begin(), values.end(), 0.0f);
  return Tensor::from(values, shape);
}

TEST(Tensor, UndefinedHoldsNothing) {
  EXPECT_FALSE(Tensor());
  EXPECT_EQ(describe(Tensor()), "undefined");
}

TEST(Tensor, KeepsValuesOfEveryType) {
  const auto round_trip = []<class T>(const std::vector<T>& values) {
    const Tensor t =
        Tensor::from(values, {static_cast<int64_t>(values.size())});
    EXPECT_EQ(t.dtype(), dtype_of<T>());
    EXPECT_EQ(t.bytes(), static_cast<int64_t>(values.size() * sizeof(T)));
    const std::vector<T> back = t.to_vector<T>();
    ASSERT_EQ(back.size(), values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(std::memcmp(&back[i], &values[i], sizeof(T)), 0);
    }
  };
  round_trip(std::vector<float>{1, -2.5f});
  round_trip(std::vector<bf16>{bf16(3), bf16(-0.0f)});
  round_trip(std::vector<double>{0.1});
  round_trip(std::vector<int32_t>{-1, 2});
  round_trip(std::vector<int64_t>{int64_t{1} << 40});
  round_trip(std::vector<uint8_t>{0, 255});
  round_trip(std::vector<float>{});
}

TEST(Tensor, ZerosAndFullAreFilled) {
  Device device(1);
  DeviceScope scope(device);
  device.pool().set_poison(true);
  EXPECT_EQ(Tensor::zeros({2, 2}, DType::kF32).to_vector<float>(),
            std::vector<float>(4, 0.0f));
  EXPECT_EQ(Tensor::full({3}, DType::kI32, -7).to_vector<int32_t>(),
            std::vector<int32_t>(3, -7));
  EXPECT_EQ(static_cast<float>(
                Tensor::full({1}, DType::kBf16, 1.5).to_vector<bf16>()[0]),
            1.5f);
  // Poison shows that empty() promises nothing.
  EXPECT_TRUE(
      std::isnan(Tensor::empty({1}, DType::kF32).to_vector<float>()[0]));
  EXPECT_EQ(Tensor::zeros({0, 3}, DType::kF32).to_vector<float>().size(), 0u);
}

TEST(Tensor, ViewsShareTheStorage) {
  const Tensor x = counted({3, 4});
  const Tensor columns = x.slice(1, 1, 3);
  const Tensor turned = x.transpose(0, -1);
  EXPECT_EQ(columns.storage(), x.storage());
  EXPECT_EQ(columns.to_vector<float>(),
            (std::vector<float>{1, 2, 5, 6, 9, 10}));
  EXPECT_FALSE(columns.contiguous());
  EXPECT_EQ(turned.shape(), (Shape{4, 3}));
  EXPECT_EQ(turned.to_vector<float>(),
            (std::vector<float>{0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11}));
  EXPECT_EQ(x.slice(0, 1, 2).view_as({2, 2}).to_vector<float>(),
            (std::vector<float>{4, 5, 6, 7}));
  EXPECT_EQ(turned.slice(0, 1, 3).slice(1, 2, 3).to_vector<float>(),
            (std::vector<float>{9, 10}));
  EXPECT_EQ(x.view_as({2, 1, 6}).strides(), (Shape{6, 6, 1}));
}

TEST(Tensor, AViewWritesWhereItPoints) {
  const Tensor x = counted({2, 3});
  {
    const auto column = write<float>(x.slice(1, 2, 3));
    column.view()(0, 0) = -1;
    column.view()(1, 0) = -2;
  }
  EXPECT_EQ(x.to_vector<float>(), (std::vector<float>{0, 1, -1, 3, 4, -2}));
}

TEST(Tensor, CloneIsContiguousAndApart) {
  const Tensor x = counted({2, 3});
  const Tensor copy = x.transpose(0, 1).clone(Tag::kWorkspace);
  EXPECT_TRUE(copy.contiguous());
  EXPECT_NE(copy.storage(), x.storage());
  EXPECT_EQ(copy.storage()->tag(), Tag::kWorkspace);
  EXPECT_EQ(copy.to_vector<float>(), (std::vector<float>{0, 3, 1, 4, 2, 5}));
  write<float>(x).view()(0, 1) = 99;
  EXPECT_EQ(copy.to_vector<float>()[2], 1.0f);
  const Tensor scalar = Tensor::full({}, DType::kF64, 2.5);
  EXPECT_EQ(scalar.clone().to_vector<double>(), std::vector<double>{2.5});
}

TEST(Tensor, WritesCountVersionsAndReadsDoNot) {
  const Tensor x = counted({2});
  const uint32_t before = x.storage()->version();
  read<float>(x);
  (void)x.to_vector<float>();
  EXPECT_EQ(x.storage()->version(), before);
  write<float>(x.slice(0, 0, 1));
  EXPECT_EQ(x.storage()->version(), before + 1);
}

TEST(Tensor, LeasesEndWithTheirScope) {
  const Tensor x = counted({2});
  {
    const auto a = read<float>(x);
    const auto b = read<float>(x);
    EXPECT_EQ(x.storage()->leases(), 2);
  }
  EXPECT_EQ(x.storage()->leases(), 0);
}

TEST(Tensor, ALeaseKeepsTheStorageAlive) {
  const int64_t before = Storage::live();
  Tensor x = counted({2});
  {
    const auto lease = read<float>(x);
    x = Tensor();
    EXPECT_EQ(Storage::live(), before + 1);
    EXPECT_EQ(lease.view()(1), 1.0f);
  }
  EXPECT_EQ(Storage::live(), before);
}

TEST(Tensor, DetachLeavesTheTape) {
  Tensor x = counted({2});
  x.requires_grad = true;
  x.tape = 3;
  x.slot = 4;
  for (const Tensor& y : {x.detach(), x.view_as({1, 2}), x.slice(0, 0, 1)}) {
    EXPECT_FALSE(y.requires_grad);
    EXPECT_EQ(y.tape, 0u);
    EXPECT_EQ(y.slot, 0u);
    EXPECT_EQ(y.storage(), x.storage());
  }
  const Tensor copy = x;
  EXPECT_TRUE(copy.requires_grad);
}

TEST(Tensor, Prints) {
  EXPECT_EQ(describe(Tensor::empty({4096, 2048}, DType::kBf16)),
            "bf16[4096, 2048]");
  EXPECT_EQ(describe(Tensor::empty({}, DType::kI64)), "i64[]");
}

TEST(Tensor, ToVectorAndCloneWaitForBytesOnTheirWay) {
  for (const bool by_clone : {false, true}) {
    FakeDevice fake;
    DeviceScope scope(fake.device());
    const Tensor x = counted({4});
    ASSERT_TRUE(x.storage()->copy_out());
    ASSERT_TRUE(x.storage()->evict());
    const std::vector<float> seen =
        by_clone ? x.clone().to_vector<float>() : x.to_vector<float>();
    EXPECT_EQ(seen, (std::vector<float>{0, 1, 2, 3}));
    EXPECT_EQ(fake.counts().synchronizations, 1) << "of the vector alone";
    EXPECT_EQ(fake.races(), 0) << fake.report();
  }
}

TEST(Tensor, SetZeroCancelsACopyOut) {
  FakeDevice fake;
  DeviceScope scope(fake.device());
  const Tensor x = counted({4});
  ASSERT_TRUE(x.storage()->copy_out());
  x.set_zero();
  EXPECT_FALSE(x.storage()->evict());
  EXPECT_EQ(x.to_vector<float>(), (std::vector<float>{0, 0, 0, 0}));
  EXPECT_EQ(fake.races(), 0) << fake.report();
}

TEST(TensorDeathTest, NamesOpAndShapes) {
  const Tensor x = counted({2, 3});
  EXPECT_DEATH(x.view_as({4}),
               "\\[view\\] f32\\[2, 3\\] does not hold \\[4\\]");
  EXPECT_DEATH(x.transpose(0, 1).view_as({6}), "strided");
  EXPECT_DEATH(x.slice(1, 2, 4), "\\[slice\\] \\[2, 4\\) of dimension 1");
  EXPECT_DEATH(x.slice(2, 0, 1), "\\[slice\\]");
  EXPECT_DEATH(x.transpose(0, 2), "\\[transpose\\]");
  EXPECT_DEATH(read<double>(x), "wanted f64, got f32\\[2, 3\\]");
  EXPECT_DEATH(read<float>(Tensor()), "undefined");
  EXPECT_DEATH(write<float>(Tensor()), "undefined");
  EXPECT_DEATH((void)Tensor().to_vector<float>(), "undefined");
  EXPECT_DEATH(Tensor::from(std::vector<float>{1}, {2}), "1 vs 2");
  EXPECT_DEATH(Tensor::empty({-1}, DType::kF32), "negative extent");
}

}  // namespace
}  // namespace tapeline
