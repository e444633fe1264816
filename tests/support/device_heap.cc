#include "tests/support/device_heap.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>

namespace tapeline {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kChunk = size_t{64} << 20;
// Blocks of 64 << i bytes; larger ones are allocations of their own.
constexpr size_t kClasses = 18;

enum class Origin : uint32_t { kHost, kChunk, kOwn };

// In the line before a block's bytes.
struct Header {
  void* base;  // of the allocation
  size_t size_class;
  Origin origin;
};

struct FreeBlock {
  FreeBlock* next;
};

// Zero-initialized: operator new may run before any constructor.
std::mutex mutex;
bool tried, works, exact;
std::byte *chunk, *chunk_end;
FreeBlock* free_blocks[kClasses];
// CUDA allocates while it serves us; that memory is not for kernels.
thread_local bool inside;

void* pinned(size_t bytes) {
  void* data = nullptr;
  inside = true;
  const cudaError_t error =
      cudaHostAlloc(&data, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  inside = false;
  return error == cudaSuccess ? data : nullptr;
}

bool start() {
  if (tried) return works;
  tried = true;
  // Every launch returns when it has run, as a loop on the CPU does. Read by
  // CUDA when it starts.
  setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
  exact = std::getenv("TAPELINE_TEST_EXACT") != nullptr;
  int count = 0;
  inside = true;
  works = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  inside = false;
  return works;
}

// Bytes of class `size_class` from the free list, else from the chunk.
std::byte* cut(size_t size_class) {
  if (FreeBlock* block = free_blocks[size_class]) {
    free_blocks[size_class] = block->next;
    return reinterpret_cast<std::byte*>(block);
  }
  const size_t bytes = kLine << size_class;
  if (static_cast<size_t>(chunk_end - chunk) < bytes) {
    chunk = static_cast<std::byte*>(pinned(kChunk));
    chunk_end = chunk == nullptr ? nullptr : chunk + kChunk;
    if (chunk == nullptr) return nullptr;
  }
  std::byte* block = chunk;
  chunk += bytes;
  return block;
}

// `alignment` is a power of two, and a line lies before what is returned.
void* allocate(size_t bytes, size_t alignment) {
  alignment = std::max(alignment, kLine);
  const size_t whole = bytes + alignment;
  Header header{nullptr, 0, Origin::kHost};
  if (!inside) {
    std::lock_guard lock(mutex);
    if (start()) {
      const size_t lines = std::bit_ceil((whole + kLine - 1) / kLine);
      header.size_class = static_cast<size_t>(std::countr_zero(lines));
      const bool own =
          header.size_class >= kClasses || (exact && bytes >= kLine);
      header.origin = own ? Origin::kOwn : Origin::kChunk;
      header.base = own ? pinned(whole) : cut(header.size_class);
      if (header.base == nullptr) return nullptr;
    }
  }
  if (header.base == nullptr) {
    header.base =
        std::aligned_alloc(alignment, (whole + alignment - 1) & -alignment);
    if (header.base == nullptr) return nullptr;
  }
  const auto after =
      (reinterpret_cast<uintptr_t>(header.base) + alignment) & -alignment;
  auto* data = reinterpret_cast<std::byte*>(after);
  *reinterpret_cast<Header*>(data - kLine) = header;
  return data;
}

void* allocate_or_abort(size_t bytes, size_t alignment) {
  void* data = allocate(bytes, alignment);
  if (data == nullptr) std::abort();
  return data;
}

void release(void* data) {
  if (data == nullptr) return;
  const Header header =
      *reinterpret_cast<Header*>(static_cast<std::byte*>(data) - kLine);
  if (header.origin == Origin::kHost) return std::free(header.base);
  if (header.origin == Origin::kOwn) {
    inside = true;
    cudaFreeHost(header.base);
    inside = false;
    return;
  }
  std::lock_guard lock(mutex);
  auto* block = static_cast<FreeBlock*>(header.base);
  block->next = free_blocks[header.size_class];
  free_blocks[header.size_class] = block;
}

}  // namespace

bool device_heap_works() {
  std::lock_guard lock(mutex);
  return start();
}

}  // namespace tapeline

void* operator new(size_t bytes) {
  return tapeline::allocate_or_abort(bytes, 1);
}
void* operator new[](size_t bytes) {
  return tapeline::allocate_or_abort(bytes, 1);
}
void* operator new(size_t bytes, std::align_val_t alignment) {
  return tapeline::allocate_or_abort(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment) {
  return tapeline::allocate_or_abort(bytes, static_cast<size_t>(alignment));
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return tapeline::allocate(bytes, 1);
}
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept {
  return tapeline::allocate(bytes, 1);
}
void operator delete(void* data) noexcept { tapeline::release(data); }
void operator delete[](void* data) noexcept { tapeline::release(data); }
void operator delete(void* data, size_t) noexcept { tapeline::release(data); }
void operator delete[](void* data, size_t) noexcept { tapeline::release(data); }
void operator delete(void* data, std::align_val_t) noexcept {
  tapeline::release(data);
}
void operator delete[](void* data, std::align_val_t) noexcept {
  tapeline::release(data);
}
void operator delete(void* data, size_t, std::align_val_t) noexcept {
  tapeline::release(data);
}
void operator delete[](void* data, size_t, std::align_val_t) noexcept {
  tapeline::release(data);
}
void operator delete(void* data, const std::nothrow_t&) noexcept {
  tapeline::release(data);
}
void operator delete[](void* data, const std::nothrow_t&) noexcept {
  tapeline::release(data);
}
