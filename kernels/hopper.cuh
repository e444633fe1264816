// Instructions that C++ has no name for, one thin function each: bulk tensor
// copies (TMA), the barriers they complete on, warpgroup matrix multiplies
// (wgmma), and of older ones asynchronous copies and 2^x.
//
// The words of PTX: an address is a 32-bit one of shared memory
// (shared_address). "Async proxy" is the path by which TMA and wgmma touch
// shared memory: what ordinary stores wrote must pass fence_async() in each
// writing thread, and then a barrier, before either reads it.
//
// One layout is used throughout, a *panel*: rows of 128 bytes (64 bf16, 32
// floats), row after row, whose eight 16-byte pieces are permuted by the row
// (swizzle). A panel starts on 1024 bytes. TMA with 128-byte swizzle writes it,
// wgmma reads it either way round:
//   K-major    a row is one m (or n) and 64 k;   the operand has one panel
//   MN-major   a row is one k and 64 m (or n);   the operand is panels of 64
#pragma once

#include <cuda.h>  // types alone: the one driver function is looked up
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

#include "runtime/check.h"

namespace tapeline::cuda {

constexpr int kPanelRowBytes = 128;  // 64 bf16, 32 floats
constexpr int kPanelAlign = 1024;    // eight rows, after which swizzle repeats

// ---------------------------------------------------------------------------
// Descriptors of tensors in global memory, made on the host.
// ---------------------------------------------------------------------------

// Encodes a descriptor for boxes of `box` elements of a tensor of extents
// `size`, innermost dimension first and contiguous; `stride_bytes` are those of
// the dimensions after it. The innermost box is a panel's row at most. What a
// box reads outside the extents is zero; what it writes there is dropped. Base
// and strides are multiples of 16 bytes. Pure arithmetic; kernels take the
// result as a const __grid_constant__ parameter.
inline CUtensorMap tensor_map(CUtensorMapDataType type, const void* base,
                              std::initializer_list<int64_t> size,
                              std::initializer_list<int64_t> stride_bytes,
                              std::initializer_list<int> box) {
  using Encode =
      CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                   const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                   const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                   CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  // Looked up, so that programs need no -lcuda to link.
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status);
    CHECK(error == cudaSuccess && found != nullptr)
        << "the driver has no cuTensorMapEncodeTiled";
    return reinterpret_cast<Encode>(found);
  }();
  constexpr int kMaxRank = 5;
  cuuint64_t sizes[kMaxRank] = {}, strides[kMaxRank] = {};
  cuuint32_t boxes[kMaxRank] = {};
  const cuuint32_t steps[kMaxRank] = {1, 1, 1, 1, 1};
  int rank = 0, i = 0;
  for (int64_t n : size) sizes[rank++] = static_cast<cuuint64_t>(n);
  for (int64_t n : stride_bytes) strides[i++] = static_cast<cuuint64_t>(n);
  CHECK_EQ(i + 1, rank);
  i = 0;
  for (int n : box) boxes[i++] = static_cast<cuuint32_t>(n);
  CHECK_EQ(i, rank);
  CUtensorMap map;
  const CUresult result =
      encode(&map, type, static_cast<cuuint32_t>(rank), const_cast<void*>(base),
             sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  CHECK(result == CUDA_SUCCESS)
      << "cuTensorMapEncodeTiled: error " << static_cast<int>(result)
      << ", base " << base << ", " << rank << " dimensions, size " << sizes[0]
      << " " << sizes[1] << " " << sizes[2] << ", strides " << strides[0] << " "
      << strides[1] << ", box " << boxes[0] << " " << boxes[1];
  return map;
}

inline int multiprocessors() {
  int device = 0, count = 0;
  CHECK(cudaGetDevice(&device) == cudaSuccess);
  CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount,
                               device) == cudaSuccess);
  return count;
}

// ---------------------------------------------------------------------------
// Threads and shared memory.
// ---------------------------------------------------------------------------

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Bytes from a panel's start to 16-byte piece `piece` (0..7) of row `row`.
__device__ inline uint32_t panel_offset(int row, int piece) {
  return static_cast<uint32_t>(row * kPanelRowBytes +
                               ((piece ^ (row & 7)) << 4));
}

constexpr float kLog2e = 1.44269504f;  // e^x is 2^(kLog2e x)

// 2^x, with a relative error of 2^-22; 0 where that is below 2^-126.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// One lane of a warp that is not diverged, the same at each call.
__device__ inline bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "elect.sync _|p, 0xffffffff;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// Registers of each thread of this warpgroup from now on. The kernel needs
// __launch_bounds__(threads, 1), and each role must be one branch.
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A barrier of `threads` threads; id 0 is __syncthreads().
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ inline void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Four 8x8 matrices of 16-bit elements: lane i gives the address of row i % 8
// of matrix i / 8, and holds columns 2 (i % 4) + {0, 1} of row i / 4 of each.
__device__ inline void store_matrices(uint32_t address, uint32_t a, uint32_t b,
                                      uint32_t c, uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
          address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}
// The same, each matrix stored transposed.
__device__ inline void store_matrices_transposed(uint32_t address, uint32_t a,
                                                 uint32_t b, uint32_t c,
                                                 uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, "
      "%4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}
__device__ inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ inline void store_shared(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y)
               : "memory");
}
__device__ inline void store_shared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ inline uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// ---------------------------------------------------------------------------
// Clusters: blocks that read each other's shared memory.
// ---------------------------------------------------------------------------

__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of all blocks of the cluster.
__device__ inline void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.aligned;\n\t"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
}

// ---------------------------------------------------------------------------
// Barriers that count arrivals and bytes (mbarrier).
// ---------------------------------------------------------------------------

// Lies in shared memory. A phase ends once `arrivals` arrive()s came and every
// expected byte did; wait(parity) returns when the phase of that parity has
// ended, so the first wait has parity 0, and wait(1) returns at once on a
// barrier that nothing has completed yet.
struct Barrier {
  uint64_t state;

  // By one thread, then fence_barriers() and a block (or cluster) barrier.
  __device__ void init(int arrivals) {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)),
        "r"(arrivals)
        : "memory");
  }
  __device__ void arrive() {
    asm volatile(
        "mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this))
        : "memory");
  }
  // On the same barrier of another block of the cluster: says that this thread
  // has finished reading, and publishes no writes. (With .release.cluster each
  // arrival would wait for all of the SM's memory traffic, a fence per slot.)
  __device__ void arrive_at(uint32_t rank) {
    asm volatile(
        "{\n\t"
        ".reg .b32 there;\n\t"
        "mapa.shared::cluster.u32 there, %0, %1;\n\t"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t"
        "}" ::"r"(shared_address(this)),
        "r"(rank)
        : "memory");
  }
  // Arrives, and lets the phase wait for so many bytes more.
  __device__ void arrive_expect(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(this)),
                 "r"(bytes)
                 : "memory");
  }
  __device__ void wait(uint32_t parity) {
    asm volatile(
        "{\n\t"
        ".reg .pred done;\n\t"
        "again:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@done bra.uni ready;\n\t"
        "bra.uni again;\n\t"
        "ready:\n\t"
        "}" ::"r"(shared_address(this)),
        "r"(parity)
        : "memory");
  }
};
// 16 bytes from global to shared memory; zeros unless `valid`. A thread waits
// for its own copies, until no more than the last kLeft groups of them may be
// on their way.
__device__ inline void copy_async(uint32_t to, const void* from, bool valid) {
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
      "l"(from), "r"(valid ? 16 : 0)
      : "memory");
}
__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kLeft>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
// Makes initialised barriers visible to TMA and to the cluster.
__device__ inline void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Where a ring of kStages slots stands. The consumer waits full[slot] with
// parity(); the producer waits empty[slot] with parity() ^ 1, which lets its
// first round pass.
template <int kStages>
struct Ring {
  int slot = 0;
  uint32_t phase = 0;

  __device__ uint32_t parity() const { return phase; }
  __device__ void next() {
    if (++slot == kStages) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// ---------------------------------------------------------------------------
// Bulk tensor copies. One thread issues; coordinates are innermost first.
// ---------------------------------------------------------------------------

__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ inline void tma_load(uint32_t to, const CUtensorMap& map,
                                Barrier& barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::"
      "bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y)
      : "memory");
}
__device__ inline void tma_load(uint32_t to, const CUtensorMap& map,
                                Barrier& barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::"
      "bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// To the same address of every block in `blocks` (a bit per rank), each of
// whose barriers counts the bytes.
__device__ inline void tma_load_multicast(uint32_t to, const CUtensorMap& map,
                                          Barrier& barrier, uint16_t blocks,
                                          int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::"
      "bytes.multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(to),
      "l"(&map), "r"(shared_address(&barrier)), "h"(blocks), "r"(x), "r"(y)
      : "memory");
}
__device__ inline void tma_load_multicast(uint32_t to, const CUtensorMap& map,
                                          Barrier& barrier, uint16_t blocks,
                                          int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::"
      "bytes.multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(to),
      "l"(&map), "r"(shared_address(&barrier)), "h"(blocks), "r"(x), "r"(y),
      "r"(z)
      : "memory");
}

// Stores belong to groups of the issuing thread: commit_stores() closes one,
// wait_stores_read<n>() returns when at most n still read shared memory,
// wait_stores<n>() when at most n are unfinished.
__device__ inline void tma_store(const CUtensorMap& map, uint32_t from, int x,
                                 int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], "
      "[%1];" ::"l"(&map),
      "r"(from), "r"(x), "r"(y)
      : "memory");
}
__device__ inline void tma_store(const CUtensorMap& map, uint32_t from, int x,
                                 int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, "
      "%4}], [%1];" ::"l"(&map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// Adds floats to what is there. Each element must have one writer, so that the
// sum has one order.
__device__ inline void tma_add(const CUtensorMap& map, uint32_t from, int x,
                               int y, int z) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// Contiguous bytes, a multiple of 16 on addresses of 16.
__device__ inline void bulk_load(uint32_t to, const void* from, uint32_t bytes,
                                 Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}
__device__ inline void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}
__device__ inline void bulk_add(float* to, uint32_t from, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], "
      "%2;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}
__device__ inline void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int kLeft>
__device__ inline void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}
template <int kLeft>
__device__ inline void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kLeft) : "memory");
}

// ---------------------------------------------------------------------------
// Warpgroup matrix multiplies: acc[64 x N] += a[64 x 16] b[16 x N], bf16 with
// fp32 sums, by 128 threads. In thread t, with g = t % 32 / 4 and c = t % 4,
//   acc[4 j + 0, 1]   row 16 (t / 32) + g,       columns 8 j + 2 c + {0, 1}
//   acc[4 j + 2, 3]   row 16 (t / 32) + g + 8,   the same columns
// wgmma_fence() comes before the first multiply after acc (or a in registers)
// was touched; multiplies are asynchronous until wgmma_wait.
// ---------------------------------------------------------------------------

enum Major : int { kMajorK = 0, kMajorMN = 1 };

// Describes a bf16 operand in shared memory from the panel at `address`.
//   K-major    rows m (or n) of one panel; the next 16 k are 32 bytes on
//   MN-major   panels of 64 m (or n), panel_bytes apart; the next 16 k are
//              16 rows on
template <Major kMajor>
__device__ inline uint64_t matrix_descriptor(uint32_t address,
                                             uint32_t panel_bytes = 16) {
  // 14-bit fields in units of 16 bytes: start, leading offset (between panels;
  // unused if K-major), stride offset (between groups of eight rows), swizzle.
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = 8 * kPanelRowBytes >> 4;
  return kSwizzle128 | kEightRows << 32 |
         static_cast<uint64_t>((panel_bytes & 0x3ffff) >> 4) << 16 |
         ((address & 0x3ffff) >> 4);
}
// The step of a descriptor by 16 k.
template <Major kMajor>
constexpr uint64_t kDescriptorStep =
    kMajor == kMajorK ? 32 >> 4 : 16 * kPanelRowBytes >> 4;

__device__ inline void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Keeps the compiler from moving accesses to acc over this point.
template <int kSize>
__device__ inline void wgmma_pin(float (&acc)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// wgmma<N, A, B>(acc, a, b): both operands by descriptors.
// wgmma<N, B>(acc, a0..a3, b): a in registers, as acc's layout of 16 columns
// packed in pairs: {row g: k 2c, 2c+1}, {row g + 8: the same}, {row g: k + 8},
// {row g + 8: k + 8}.
// With zero = true what was in acc is dropped.
template <int N, Major kA, Major kB>
__device__ void wgmma(float (&acc)[N / 2], uint64_t a, uint64_t b,
                      bool zero = false) = delete;
template <int N, Major kB>
__device__ void wgmma(float (&acc)[N / 2], uint32_t a0, uint32_t a1,
                      uint32_t a2, uint32_t a3, uint64_t b,
                      bool zero = false) = delete;

// The text of PTX's operand lists, eight registers at a time.
#define TAPELINE_8(a, b, c, d, e, f, g, h) \
  "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define TAPELINE_R32                                                          \
  TAPELINE_8(0, 1, 2, 3, 4, 5, 6, 7)                                          \
  ", " TAPELINE_8(8, 9, 10, 11, 12, 13, 14, 15) ", " TAPELINE_8(              \
      16, 17, 18, 19, 20, 21, 22, 23) ", " TAPELINE_8(24, 25, 26, 27, 28, 29, \
                                                      30, 31)
#define TAPELINE_R48                                               \
  TAPELINE_R32                                                     \
  ", " TAPELINE_8(32, 33, 34, 35, 36, 37, 38, 39) ", " TAPELINE_8( \
      40, 41, 42, 43, 44, 45, 46, 47)
#define TAPELINE_R64                                               \
  TAPELINE_R48                                                     \
  ", " TAPELINE_8(48, 49, 50, 51, 52, 53, 54, 55) ", " TAPELINE_8( \
      56, 57, 58, 59, 60, 61, 62, 63)
#define TAPELINE_R80                                               \
  TAPELINE_R64                                                     \
  ", " TAPELINE_8(64, 65, 66, 67, 68, 69, 70, 71) ", " TAPELINE_8( \
      72, 73, 74, 75, 76, 77, 78, 79)
#define TAPELINE_R96                                               \
  TAPELINE_R80                                                     \
  ", " TAPELINE_8(80, 81, 82, 83, 84, 85, 86, 87) ", " TAPELINE_8( \
      88, 89, 90, 91, 92, 93, 94, 95)
#define TAPELINE_R112                                                  \
  TAPELINE_R96                                                         \
  ", " TAPELINE_8(96, 97, 98, 99, 100, 101, 102, 103) ", " TAPELINE_8( \
      104, 105, 106, 107, 108, 109, 110, 111)
#define TAPELINE_R128                                                      \
  TAPELINE_R112                                                            \
  ", " TAPELINE_8(112, 113, 114, 115, 116, 117, 118, 119) ", " TAPELINE_8( \
      120, 121, 122, 123, 124, 125, 126, 127)

#define TAPELINE_F8(i)                                                \
  "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3]), \
      "+f"(acc[i + 4]), "+f"(acc[i + 5]), "+f"(acc[i + 6]), "+f"(acc[i + 7])
#define TAPELINE_F16(i) TAPELINE_F8(i), TAPELINE_F8(i + 8)
#define TAPELINE_F32 TAPELINE_F16(0), TAPELINE_F16(16)
#define TAPELINE_F48 TAPELINE_F32, TAPELINE_F16(32)
#define TAPELINE_F64 TAPELINE_F48, TAPELINE_F16(48)
#define TAPELINE_F80 TAPELINE_F64, TAPELINE_F16(64)
#define TAPELINE_F96 TAPELINE_F80, TAPELINE_F16(80)
#define TAPELINE_F112 TAPELINE_F96, TAPELINE_F16(96)
#define TAPELINE_F128 TAPELINE_F112, TAPELINE_F16(112)

// N columns take R = N / 2 registers; o0.. are the operands after them.
#define TAPELINE_WGMMA(N, R, o0, o1, o2, o3, o4, o5)                      \
  template <>                                                             \
  __device__ inline void wgmma<N, kMajorK, kMajorK>(                      \
      float(&acc)[R], uint64_t a, uint64_t b, bool zero) {                \
    TAPELINE_WGMMA_SHARED(N, R, o0, o1, o2, "0", "0")                     \
  }                                                                       \
  template <>                                                             \
  __device__ inline void wgmma<N, kMajorK, kMajorMN>(                     \
      float(&acc)[R], uint64_t a, uint64_t b, bool zero) {                \
    TAPELINE_WGMMA_SHARED(N, R, o0, o1, o2, "0", "1")                     \
  }                                                                       \
  template <>                                                             \
  __device__ inline void wgmma<N, kMajorMN, kMajorK>(                     \
      float(&acc)[R], uint64_t a, uint64_t b, bool zero) {                \
    TAPELINE_WGMMA_SHARED(N, R, o0, o1, o2, "1", "0")                     \
  }                                                                       \
  template <>                                                             \
  __device__ inline void wgmma<N, kMajorMN, kMajorMN>(                    \
      float(&acc)[R], uint64_t a, uint64_t b, bool zero) {                \
    TAPELINE_WGMMA_SHARED(N, R, o0, o1, o2, "1", "1")                     \
  }                                                                       \
  template <>                                                             \
  __device__ inline void wgmma<N, kMajorK>(                               \
      float(&acc)[R], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, \
      uint64_t b, bool zero) {                                            \
    TAPELINE_WGMMA_REGISTERS(N, R, o0, o1, o2, o3, o4, o5, "0")           \
  }                                                                       \
  template <>                                                             \
  __device__ inline void wgmma<N, kMajorMN>(                              \
      float(&acc)[R], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, \
      uint64_t b, bool zero) {                                            \
    TAPELINE_WGMMA_REGISTERS(N, R, o0, o1, o2, o3, o4, o5, "1")           \
  }
#define TAPELINE_WGMMA_SHARED(N, R, o0, o1, o2, a_major, b_major) \
  asm volatile(                                                   \
      "{\n\t"                                                     \
      ".reg .pred keep;\n\t"                                      \
      "setp.eq.b32 keep, %" #o2                                   \
      ", 0;\n\t"                                                  \
      "wgmma.mma_async.sync.aligned.m64n" #N                      \
      "k16.f32.bf16.bf16 {" TAPELINE_R##R                         \
      "}, %" #o0 ", %" #o1 ", keep, 1, 1, " a_major ", " b_major  \
      ";\n\t"                                                     \
      "}"                                                         \
      : TAPELINE_F##R                                             \
      : "l"(a), "l"(b), "r"(static_cast<int>(zero)));
#define TAPELINE_WGMMA_REGISTERS(N, R, o0, o1, o2, o3, o4, o5, b_major)   \
  asm volatile(                                                           \
      "{\n\t"                                                             \
      ".reg .pred keep;\n\t"                                              \
      "setp.eq.b32 keep, %" #o5                                           \
      ", 0;\n\t"                                                          \
      "wgmma.mma_async.sync.aligned.m64n" #N                              \
      "k16.f32.bf16.bf16 {" TAPELINE_R##R "}, {%" #o0 ", %" #o1 ", %" #o2 \
                                          ", %" #o3 "}, %" #o4            \
                                          ", keep, 1, 1, " b_major        \
                                          ";\n\t"                         \
                                          "}"                             \
      : TAPELINE_F##R                                                     \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b),                       \
        "r"(static_cast<int>(zero)));

TAPELINE_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
TAPELINE_WGMMA(96, 48, 48, 49, 50, 51, 52, 53)
TAPELINE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)
TAPELINE_WGMMA(160, 80, 80, 81, 82, 83, 84, 85)
TAPELINE_WGMMA(192, 96, 96, 97, 98, 99, 100, 101)
TAPELINE_WGMMA(224, 112, 112, 113, 114, 115, 116, 117)
TAPELINE_WGMMA(256, 128, 128, 129, 130, 131, 132, 133)

#undef TAPELINE_WGMMA
#undef TAPELINE_WGMMA_SHARED
#undef TAPELINE_WGMMA_REGISTERS
#undef TAPELINE_8
#undef TAPELINE_R32
#undef TAPELINE_R48
#undef TAPELINE_R64
#undef TAPELINE_R80
#undef TAPELINE_R96
#undef TAPELINE_R112
#undef TAPELINE_R128
#undef TAPELINE_F8
#undef TAPELINE_F16
#undef TAPELINE_F32
#undef TAPELINE_F48
#undef TAPELINE_F64
#undef TAPELINE_F80
#undef TAPELINE_F96
#undef TAPELINE_F112
#undef TAPELINE_F128

}  // namespace tapeline::cuda
