#include "runtime/cuda_device.h"

#include <cstring>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/cuda_stream.h"
#include "runtime/storage.h"
#include "runtime/tensor.h"

namespace tapeline {
namespace {

// On a device of its own: counts and caps are not those of other tests.
class CudaDevice : public testing::Test {
 protected:
  CudaDevice()
      : device_(std::move(make_cuda_device()).value()), scope_(*device_) {}

  CudaStream& compute() {
    return dynamic_cast<CudaStream&>(device_->compute());
  }
  void finish() {
    for (Stream* s :
         {&device_->compute(), &device_->copy_out(), &device_->copy_in()}) {
      s->native();
      s->synchronize(s->record());
    }
  }

  std::unique_ptr<Device> device_;
  DeviceScope scope_;
};

std::vector<float> ramp(int64_t n) {
  std::vector<float> values(static_cast<size_t>(n));
  std::iota(values.begin(), values.end(), 1.0f);
  return values;
}

TEST_F(CudaDevice, SaysWhatItIs) {
  EXPECT_EQ(device_->kind(), DeviceKind::kCuda);
  EXPECT_FALSE(device_->dry());
  const CudaProperties properties = cuda_properties().value();
  EXPECT_FALSE(properties.name.empty());
  EXPECT_EQ(properties.uuid.size(), 40u);
  EXPECT_GT(properties.memory, size_t{1} << 30);
}

TEST_F(CudaDevice, ThereIsNoHundredth) {
  const auto device = make_cuda_device(99);
  EXPECT_EQ(device.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Tensor::full({2}, DType::kF32, 3).to_vector<float>()[1], 3);
}

TEST_F(CudaDevice, ValuesGoThereAndBack) {
  // More than both halves of the staging memory.
  for (int64_t n : {0, 1, 1000, 1003, 5 << 20}) {
    const std::vector<float> values = ramp(n);
    EXPECT_EQ(Tensor::from(values, {n}).to_vector<float>(), values) << n;
  }
  const std::vector<uint8_t> bytes = {1, 2, 255};
  EXPECT_EQ(Tensor::from(bytes, {3}).to_vector<uint8_t>(), bytes);
}

TEST_F(CudaDevice, ValuesMayChangeAsSoonAsTheyWereGiven) {
  std::vector<float> values = ramp(1 << 18);
  const std::vector<float> before = values;
  const Tensor x = Tensor::from(values, {1 << 18});
  std::fill(values.begin(), values.end(), 0.0f);
  EXPECT_EQ(x.to_vector<float>(), before);
}

TEST_F(CudaDevice, FillsEveryDtype) {
  for (double value : {0.0, 3.0}) {
    EXPECT_EQ(Tensor::full({7}, DType::kF32, value).to_vector<float>(),
              std::vector<float>(7, static_cast<float>(value)));
    EXPECT_EQ(Tensor::full({7}, DType::kF64, value).to_vector<double>(),
              std::vector<double>(7, value));
    EXPECT_EQ(Tensor::full({7}, DType::kI64, value).to_vector<int64_t>(),
              std::vector<int64_t>(7, static_cast<int64_t>(value)));
    EXPECT_EQ(Tensor::full({7}, DType::kU8, value).to_vector<uint8_t>(),
              std::vector<uint8_t>(7, static_cast<uint8_t>(value)));
    for (bf16 x : Tensor::full({7}, DType::kBf16, value).to_vector<bf16>()) {
      EXPECT_EQ(float{x}, value);
    }
  }
}

TEST_F(CudaDevice, ClonesWhateverTheStrides) {
  const Tensor x = Tensor::from(ramp(2 * 3 * 4), {2, 3, 4});
  EXPECT_EQ(x.slice(1, 1, 2).to_vector<float>(),
            (std::vector<float>{5, 6, 7, 8, 17, 18, 19, 20}));
  EXPECT_EQ(x.slice(0, 0, 1).transpose(1, 2).clone().to_vector<float>(),
            (std::vector<float>{1, 5, 9, 2, 6, 10, 3, 7, 11, 4, 8, 12}));
  EXPECT_EQ(Tensor::from(ramp(2), {2}).broadcast_dim(1, 2).to_vector<float>(),
            (std::vector<float>{1, 1, 2, 2}));
  EXPECT_EQ(x.slice(2, 0, 0).clone().elements(), 0);
}

TEST_F(CudaDevice, RecordsOfNothingNewAreOneEvent) {
  CudaStream& stream = compute();
  stream.native();
  const Event first = stream.record();
  EXPECT_EQ(stream.record().sequence, first.sequence);
  stream.native();
  EXPECT_GT(stream.record().sequence, first.sequence);
  // Nobody asked, so CUDA was not told of any.
  EXPECT_EQ(stream.events_recorded(), 0);
  stream.synchronize(first);
  EXPECT_TRUE(first.done());
  EXPECT_EQ(stream.events_recorded(), 1);
}

// What is queued later is no part of a place that was marked at once.
TEST_F(CudaDevice, AStreamThatMarksAtOnceTellsCudaOfEveryPlace) {
  CudaStream stream("line", Marks::kAtOnce);
  stream.native();
  const Event first = stream.record();
  EXPECT_EQ(stream.events_recorded(), 1);
  EXPECT_EQ(stream.record().sequence, first.sequence);
  EXPECT_EQ(stream.events_recorded(), 1);
  stream.native();
  const Event second = stream.record();
  EXPECT_EQ(stream.events_recorded(), 2);
  compute().wait(first);
  stream.synchronize(second);
  EXPECT_TRUE(first.done());
  EXPECT_EQ(stream.events_recorded(), 2);
}

TEST_F(CudaDevice, OldEventsStayTrue) {
  CudaStream& stream = compute();
  const Tensor x = Tensor::empty({1 << 20}, DType::kF32);
  std::vector<Event> events;
  for (int i = 0; i < 1000; ++i) {
    stream.native();
    events.push_back(stream.record());
    device_->copy_out().wait(events.back());
  }
  for (const Event& event : events) stream.synchronize(event);
  for (const Event& event : events) EXPECT_TRUE(event.done());
}

// A long queue of fills, then a copy on another stream that must follow it.
TEST_F(CudaDevice, AnotherStreamWaits) {
  const Tensor x = Tensor::empty({1 << 24}, DType::kF32);
  for (int i = 0; i <= 100; ++i) x.fill(i);
  EXPECT_TRUE(x.storage()->copy_out());
  EXPECT_TRUE(x.storage()->evict());
  // The block goes to another tensor at once, which must not spoil the copy.
  const Tensor y = Tensor::full({1 << 24}, DType::kF32, -1);
  x.storage()->load();
  const std::vector<float> values = x.to_vector<float>();
  EXPECT_EQ(values.front(), 100);
  EXPECT_EQ(values.back(), 100);
  EXPECT_EQ(y.to_vector<float>().back(), -1);
}

TEST_F(CudaDevice, UsingEvictedBytesLoadsThem) {
  const Tensor x = Tensor::from(ramp(1000), {1000});
  ASSERT_TRUE(x.storage()->copy_out());
  ASSERT_TRUE(x.storage()->evict());
  EXPECT_EQ(x.to_vector<float>(), ramp(1000));
}

TEST_F(CudaDevice, ASteadyStepAllocatesNothing) {
  const auto step = [&] {
    const Tensor x = Tensor::full({1 << 16}, DType::kF32, 1);
    const Tensor y = x.clone();
    EXPECT_TRUE(y.storage()->copy_out());
    EXPECT_TRUE(y.storage()->evict());
    EXPECT_EQ(y.to_vector<float>()[5], 1);
  };
  for (int i = 0; i < 3; ++i) step();
  const int64_t device = device_->pool().stats().system_allocations;
  const int64_t pinned = device_->pinned().stats().system_allocations;
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(device_->pool().stats().system_allocations, device);
  EXPECT_EQ(device_->pinned().stats().system_allocations, pinned);
}

TEST_F(CudaDevice, MemoryNobodyWroteIsNan) {
  device_->pool().set_poison(true);
  const Tensor x = Tensor::empty({1000}, DType::kF32);
  for (float value : x.to_vector<float>()) EXPECT_NE(value, value);
}

// The pool gives up free blocks before it says that there is no memory.
TEST_F(CudaDevice, ACapHoldsAndFreeBlocksGiveWay) {
  device_->pool().set_cap(8 << 20);
  { const Tensor x = Tensor::full({1 << 20}, DType::kF32, 1); }
  const Tensor y = Tensor::full({3 << 19}, DType::kF32, 2);
  EXPECT_EQ(y.to_vector<float>().back(), 2);
  EXPECT_LE(device_->pool().stats().peak_reserved, 8 << 20);
}

// More than any GPU has: refused, and no error stays behind.
TEST_F(CudaDevice, RefusedMemoryIsNoError) {
  Pool& pinned = device_->pinned();
  const Block block =
      pinned.allocate(size_t{1} << 44, Tag::kOther, &device_->copy_out());
  EXPECT_EQ(block.data, nullptr);
  EXPECT_EQ(pinned.stats().refusals, 1);
  EXPECT_EQ(Tensor::full({2}, DType::kF32, 3).to_vector<float>()[1], 3);
  finish();
}

// Bytes on the heap of this test are there for kernels, too: a copy from device
// to device finds them.
TEST_F(CudaDevice, TheHeapIsForKernels) {
  const std::vector<uint32_t> from(1000, 7);
  std::vector<uint32_t> to(1000, 0);
  // Strided, so that a kernel moves them.
  compute().gather(to.data(), from.data(), 4, {500}, {2});
  compute().synchronize(compute().record());
  EXPECT_EQ(to[499], 7u);
  EXPECT_EQ(to[500], 0u);
}

TEST_F(CudaDevice, StridedCopiesHaveWordsOfEveryWidth) {
  constexpr int64_t kTokens = 6, kHeads = 8, kWidth = 32;
  std::vector<uint64_t> memory(kTokens * kHeads * kWidth + 2);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = i * 0x9e3779b97f4a7c15;
  const auto* bytes = reinterpret_cast<const std::byte*>(memory.data());
  for (const size_t element : {1, 2, 4, 8}) {
    for (const size_t offset : {size_t{0}, element, size_t{8}, size_t{16}}) {
      // Of each token's heads, heads of all tokens; 31 elements of 32 as well.
      for (const int64_t width : {kWidth, kWidth - 1}) {
        const Shape shape = {kHeads, kTokens, width};
        const Shape strides = {kWidth, kHeads * kWidth, 1};
        std::vector<std::byte> expected, to(shape.elements() * element);
        for (int64_t h = 0; h < kHeads; ++h) {
          for (int64_t t = 0; t < kTokens; ++t) {
            const auto* row =
                bytes + offset + (h + t * kHeads) * kWidth * element;
            expected.insert(expected.end(), row, row + width * element);
          }
        }
        compute().gather(to.data(), bytes + offset, element, shape, strides);
        compute().synchronize(compute().record());
        EXPECT_EQ(to, expected) << element << " " << offset << " " << width;
      }
    }
  }
}

}  // namespace
}  // namespace tapeline
