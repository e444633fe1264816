#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/cuda_check.h"
#include "runtime/cuda_stream.h"
#include "runtime/gather_plan.h"

namespace tapeline {
namespace {

// More than are ever asked for before the oldest of them is done: a step of a
// deep model waits for a few copies per layer.
constexpr size_t kMarkers = 1024;
// Two halves, so that one is filled while the other is read. A copy runs behind
// the kernels queued before it, and who begins a half waits for the copies out
// of it: more than a step's batches, so that this is work long done.
constexpr size_t kHalf = size_t{16} << 20;
constexpr size_t kLine = 64;
constexpr int kThreads = 256;
// Blocks that fill any GPU; a thread walks what is left.
constexpr int64_t kMaxBlocks = 2048;

unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>(
      std::min((count + kThreads - 1) / kThreads, kMaxBlocks));
}

template <class W>
__global__ void fill_words(W* to, W word, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += step) {
    to[i] = word;
  }
}

template <class W, class I>
__global__ void gather_words(W* to, const W* from, GatherPlan plan) {
  const I count = static_cast<I>(plan.count);
  const I step = gridDim.x * kThreads;
  for (I i = static_cast<I>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += step) {
    I rest = i, at = 0;
#pragma unroll
    for (int d = Shape::kMaxRank - 1; d > 0; --d) {
      if (d >= plan.dims) continue;
      const I size = static_cast<I>(plan.size[d]);
      at += rest % size * static_cast<I>(plan.stride[d]);
      rest /= size;
    }
    to[i] = from[at + rest * static_cast<I>(plan.stride[0])];
  }
}

template <class F>
void with_word(size_t size, F f) {
  switch (size) {
    case 1:
      return f(uint8_t{});
    case 2:
      return f(uint16_t{});
    case 4:
      return f(uint32_t{});
    default:
      CHECK_EQ(size, 8u) << "an element of " << size << " bytes";
      return f(uint64_t{});
  }
}

}  // namespace

CudaStream::CudaStream(std::string name, Marks marks)
    : Stream(std::move(name)), marks_(marks), ring_(kMarkers) {
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  for (Marker& marker : ring_) {
    CUDA_CHECK(cudaEventCreateWithFlags(&marker.event, cudaEventDisableTiming));
  }
}

CudaStream::~CudaStream() {
  CUDA_CHECK(cudaStreamSynchronize(stream_));
  for (Marker& marker : ring_) CUDA_CHECK(cudaEventDestroy(marker.event));
  if (staging_ != nullptr) CUDA_CHECK(cudaFreeHost(staging_));
  CUDA_CHECK(cudaStreamDestroy(stream_));
}

void CudaStream::copy(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_));
  queued_ = copied_ = true;
}

void CudaStream::upload(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  if (staging_ == nullptr) {
    CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&staging_), 2 * kHalf,
                             cudaHostAllocDefault));
  }
  auto* target = static_cast<std::byte*>(to);
  auto* source = static_cast<const std::byte*>(from);
  while (bytes > 0) {
    if (used_ == kHalf) {
      staged_[half_] = record();
      half_ = 1 - half_;
      used_ = 0;
      synchronize(staged_[half_]);
    }
    const size_t part = std::min(bytes, kHalf - used_);
    std::byte* staged = staging_ + static_cast<size_t>(half_) * kHalf + used_;
    std::memcpy(staged, source, part);
    copy(target, staged, part);
    used_ = std::min(kHalf, (used_ + part + kLine - 1) / kLine * kLine);
    target += part;
    source += part;
    bytes -= part;
  }
}

void CudaStream::download(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_));
  CUDA_CHECK(cudaStreamSynchronize(stream_));
}

void CudaStream::fill(void* to, const void* element, size_t size,
                      int64_t count) {
  if (count == 0) return;
  queued_ = true;
  with_word(size, [&]<class W>(W word) {
    std::memcpy(&word, element, sizeof(W));
    if (word == 0) {
      CUDA_CHECK(cudaMemsetAsync(to, 0, static_cast<size_t>(count) * sizeof(W),
                                 stream_));
    } else {
      fill_words<<<blocks_for(count), kThreads, 0, stream_>>>(
          static_cast<W*>(to), word, count);
      CUDA_CHECK(cudaGetLastError());
    }
  });
}

void CudaStream::gather(void* to, const void* from, size_t size,
                        const Shape& shape, const Shape& strides) {
  const int64_t count = shape.elements();
  if (is_contiguous(shape, strides)) {
    const size_t bytes = static_cast<size_t>(count) * size;
    if (bytes == 0) return;
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_));
    queued_ = true;
    return;
  }
  if (count == 0) return;
  queued_ = true;
  const auto addresses =
      reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  const GatherPlan plan =
      plan_gather(size, shape, strides, addresses & (~addresses + 1));
  const auto run = [&]<class W>(W) {
    const auto launch =
        plan.small ? gather_words<W, uint32_t> : gather_words<W, uint64_t>;
    launch<<<blocks_for(plan.count), kThreads, 0, stream_>>>(
        static_cast<W*>(to), static_cast<const W*>(from), plan);
    CUDA_CHECK(cudaGetLastError());
  };
  if (plan.word == sizeof(uint4)) {
    run(uint4{});
  } else {
    with_word(plan.word, run);
  }
}

CudaStream::Marker& CudaStream::mark() const {
  newest_ = (newest_ + 1) % ring_.size();
  Marker& marker = ring_[newest_];
  CUDA_CHECK(cudaEventRecord(marker.event, stream_));
  marker.sequence = issued_;
  ++events_recorded_;
  return marker;
}

CudaStream::Marker& CudaStream::marker(uint64_t sequence) const {
  CHECK_LE(sequence, issued_) << "stream " << name();
  if (ring_[newest_].sequence < sequence) return mark();
  // From the oldest on.
  for (size_t i = 1; i < ring_.size(); ++i) {
    Marker& marker = ring_[(newest_ + i) % ring_.size()];
    if (marker.sequence >= sequence) return marker;
  }
  return ring_[newest_];
}

Event CudaStream::record() {
  if (std::exchange(queued_, false)) {
    ++issued_;
    if (std::exchange(copied_, false) || marks_ == Marks::kAtOnce) mark();
  }
  return {this, issued_};
}

void CudaStream::wait(const Event& event) {
  if (event.stream == this || event.done()) return;
  if (const auto* other = dynamic_cast<const CudaStream*>(event.stream)) {
    CUDA_CHECK(
        cudaStreamWaitEvent(stream_, other->marker(event.sequence).event, 0));
    queued_ = true;
  } else {
    const_cast<Stream*>(event.stream)->synchronize(event);
  }
}

void CudaStream::synchronize(const Event& event) {
  if (event.done()) return;
  const auto* stream = dynamic_cast<const CudaStream*>(event.stream);
  if (stream == nullptr) {
    return const_cast<Stream*>(event.stream)->synchronize(event);
  }
  Marker& marker = stream->marker(event.sequence);
  CUDA_CHECK(cudaEventSynchronize(marker.event));
  stream->completed_ = std::max(stream->completed_, marker.sequence);
}

bool CudaStream::done(uint64_t sequence) const {
  if (sequence <= completed_) return true;
  if (ring_[newest_].sequence < sequence) return false;
  const Marker& marker = this->marker(sequence);
  const cudaError_t state = cudaEventQuery(marker.event);
  if (state == cudaErrorNotReady) {
    cudaGetLastError();  // it counts as one, for the next who asks
    return false;
  }
  CUDA_CHECK(state);
  completed_ = std::max(completed_, marker.sequence);
  return true;
}

uint64_t CudaStream::completed() const {
  done(issued_);
  return completed_;
}

}  // namespace tapeline
