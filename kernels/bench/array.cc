#include "kernels/bench/array.h"

#include <algorithm>
#include <utility>

#include "kernels/bench/normal.h"
#include "kernels/bench/normal_cuda.h"
#include "kernels/cuda_dispatch.h"
#include "kernels/kernel.h"

namespace tapeline::bench {
namespace {

constexpr size_t kPage = size_t{64} << 10;

int current_set = 0;

}  // namespace

Bytes::Bytes(size_t size) : device_(&Device::current()), size_(size) {
  // One byte more, so that an empty one has an address.
  block_ = device_->pool().allocate(size + 1, Tag::kOther, &device_->compute());
  zero();
}

Bytes::Bytes(const Bytes& other) : Bytes(other.size_) {
  device_->compute().copy(block_.data, other.block_.data, size_);
}

Bytes::Bytes(Bytes&& other) noexcept
    : device_(other.device_),
      block_(std::exchange(other.block_, {})),
      size_(other.size_),
      host_(std::move(other.host_)),
      here_(std::move(other.here_)) {}

Bytes& Bytes::operator=(Bytes other) noexcept {
  std::swap(device_, other.device_);
  std::swap(block_, other.block_);
  std::swap(size_, other.size_);
  std::swap(host_, other.host_);
  std::swap(here_, other.here_);
  return *this;
}

Bytes::~Bytes() {
  if (!block_.data) return;
  device_->pool().free(block_, {device_->compute().record()});
}

std::byte* Bytes::data() {
  here_.clear();
  return block_.data;
}

void Bytes::upload(const void* from) {
  device_->compute().upload(data(), from, size_);
}

void Bytes::zero() {
  const uint8_t zero = 0;
  device_->compute().fill(data(), &zero, 1, static_cast<int64_t>(size_));
}

const std::byte* Bytes::host(size_t begin, size_t end) const {
  if (device_->kind() == DeviceKind::kCpu) return block_.data + begin;
  if (!host_) host_ = std::make_unique_for_overwrite<std::byte[]>(size_);
  if (here_.empty()) here_.resize(size_ / kPage + 1);
  const size_t pages = (end + kPage - 1) / kPage;
  for (size_t page = begin / kPage; page < pages; ++page) {
    if (here_[page]) continue;
    size_t last = page;
    while (last < pages && !here_[last]) here_[last++] = true;
    const size_t from = page * kPage;
    device_->compute().download(host_.get() + from, block_.data + from,
                                std::min(last * kPage, size_) - from);
    page = last;
  }
  return host_.get() + begin;
}

void use_set(int set) { current_set = set; }

template <class T>
Array<T> normal(int64_t n, uint32_t seed) {
  Array<T> out(n);
  const Launch l = launch();
  const uint64_t key =
      (uint64_t{seed} << 32) + static_cast<uint64_t>(current_set);
  if (kCuda && l.on_cuda()) {
    cuda::fill_normal(l, key, view_of(out, {n}));
    return out;
  }
  T* values = out.data();
  l.threads->parallel_for(n, 8192, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      values[i] = T(float{bf16(normal_at(key, static_cast<uint64_t>(i)))});
    }
  });
  return out;
}
template Array<float> normal(int64_t, uint32_t);
template Array<bf16> normal(int64_t, uint32_t);
template Array<double> normal(int64_t, uint32_t);

}  // namespace tapeline::bench
