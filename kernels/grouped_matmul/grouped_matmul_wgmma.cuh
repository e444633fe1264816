// The grouped matmul on tensor cores: one persistent kernel, three passes.
//
//            C [M, N]        A [M, K]           B [N, K] as it lies
//   forward  y  of expert e  x   K-major        w[e]  K-major
//   dgrad    dx of expert e  dy  K-major        w[e]  MN-major
//   wgrad    dw[e]           dy^T  MN-major     x^T   MN-major, K = rows of e
//
// Every block walks the experts' offsets and takes each gridDim-th tile, so no
// row count ever reaches the host. One thread loads tiles of A and B by TMA
// into a ring; two warpgroups multiply, each 64 of a tile's 128 rows.
// Rows need no padding: a load may run into the next expert's rows (or be
// zero-filled past the last), which fills accumulator rows that are not stored.
// Where rows are summed over (wgrad) what lies behind the expert's last row is
// zeroed in both operands, since 0 * NaN is NaN. There tiles take as long as
// their expert has rows, so the largest experts come first (Tiles).
#pragma once

#include "kernels/cuda.cuh"
#include "kernels/grouped_matmul/grouped_matmul_fast.h"
#include "kernels/hopper.cuh"

namespace tapeline::cuda {

struct GroupedMatmulArguments {
  const void* a;                         // x, dy, dy
  const void* b;                         // w, w, x
  void* c;                               // y, dx, dw
  int64_t a_stride, b_stride, c_stride;  // between rows, in elements
  int64_t b_expert, c_expert;            // between experts of w or dw
  const int32_t* offsets;
  int64_t experts, rows, f, d;
};

namespace grouped_matmul_wgmma {

constexpr int kBm = 128;
constexpr int kBk = 64;
constexpr int kConsumers = 2;  // warpgroups, each of 64 rows
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kPanelBytes = 64 * kPanelRowBytes;
// More experts than that are not put in order.
constexpr int kMostOrdered = 1024;
// 168 a thread at launch: 384 * 168 = 128 * 56 + 256 * 224.
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 224;

template <GroupedMatmulPass pass, int bn, int stages, int cluster>
struct Config {
  static constexpr GroupedMatmulPass kPass = pass;
  static constexpr bool kWgrad = pass == GroupedMatmulPass::kWgrad;
  static constexpr int kBn = bn;
  static constexpr int kStages = stages;
  // Blocks that take tiles one below the other and share B by multicast.
  static constexpr int kCluster = cluster;
  static_assert(kCluster > 1);

  static constexpr Major kAMajor = kWgrad ? kMajorMN : kMajorK;
  static constexpr Major kBMajor =
      pass == GroupedMatmulPass::kForward ? kMajorK : kMajorMN;
  static constexpr int kABytes = kBm * kBk * 2;
  static constexpr int kBBytes = kBn * kBk * 2;
  static constexpr int kSlotBytes = kABytes + kBBytes;
  static constexpr int kRingBytes = kStages * kSlotBytes;
  // Two panels a warpgroup: one is written while the other is being read.
  static constexpr int kStagingBytes = kConsumers * 2 * kPanelBytes;
  static constexpr int kOrderBytes =
      kWgrad ? kMostOrdered * int{sizeof(uint16_t)} : 0;
  static constexpr int kSharedBytes = kRingBytes + kStagingBytes +
                                      2 * kStages * int{sizeof(Barrier)} +
                                      kOrderBytes;
  static_assert(kSharedBytes <= 227 * 1024);
  static_assert(kBn % 64 == 0 && kBn <= 256);
};

struct Problem {
  const int32_t* offsets;
  int experts;
  int m;  // rows of dw[e]; unused elsewhere
  int n;  // columns of C
  int k;  // length of the sum; rows of e in wgrad
  int group;
  void* c;
  int64_t c_stride, c_expert;
};

struct Tile {
  int expert;
  int begin, end;  // the expert's rows
  int m, n;        // its corner of C, m relative to the expert
};

// The tiles of all experts, every `step`-th from `first`; in wgrad each second
// round goes backwards, and experts come in `order` (null: as they lie): by
// falling numbers of rows, so every cluster gets about as much work. Within an
// expert, up to p.group tiles below each other, which share B in L2, then the
// next column strip; the groups of one expert are about equally high.
template <int kM, int kN, bool kWgrad>
class Tiles {
 public:
  __device__ Tiles(const Problem& p, const uint16_t* order, int first, int step)
      : p_(p),
        order_(order),
        at_(first),
        step_(kWgrad ? 2 * (step - first) - 1 : step),
        steps_(2 * step) {
    n_tiles_ = (p.n + kN - 1) / kN;
  }
  __device__ bool next(Tile& tile) {
    while (at_ >= base_ + m_tiles_ * n_tiles_) {
      base_ += m_tiles_ * n_tiles_;
      if (++place_ >= p_.experts) return false;
      expert_ = order_ == nullptr ? place_ : order_[place_];
      begin_ = __ldg(p_.offsets + expert_);
      end_ = __ldg(p_.offsets + expert_ + 1);
      const int m = kWgrad ? (end_ > begin_ ? p_.m : 0) : end_ - begin_;
      m_tiles_ = (m + kM - 1) / kM;
      const int groups = max((m_tiles_ + p_.group - 1) / p_.group, 1);
      group_ = (m_tiles_ + groups - 1) / groups;
    }
    const int i = at_ - base_;
    at_ += step_;
    if constexpr (kWgrad) step_ = steps_ - step_;
    const int group = i / (group_ * n_tiles_);
    const int within = i - group * (group_ * n_tiles_);
    const int high = min(group_, m_tiles_ - group * group_);
    const int n = within / high;
    tile = {expert_, begin_, end_, (group * group_ + within - n * high) * kM,
            n * kN};
    return true;
  }

 private:
  const Problem& p_;
  const uint16_t* order_;
  int at_, step_;
  int steps_;  // of two rounds
  int n_tiles_, m_tiles_ = 0, group_ = 1, base_ = 0;
  int place_ = -1, expert_ = 0, begin_ = 0, end_ = 0;
};

// order[i]: the expert that i others precede, by falling numbers of rows, then
// as they lie. By all threads.
__device__ inline void order_experts(const Problem& p, uint16_t* order) {
  const auto rows = [&](int expert) {
    return __ldg(p.offsets + expert + 1) - __ldg(p.offsets + expert);
  };
  for (int e = threadIdx.x; e < p.experts; e += kThreads) {
    const int mine = rows(e);
    int before = 0;
#pragma unroll 8
    for (int i = 0; i < p.experts; ++i) {
      const int other = rows(i);
      before += other > mine || (other == mine && i < e);
    }
    order[before] = static_cast<uint16_t>(e);
  }
}

template <class C>
using TilesOf = Tiles<C::kCluster * kBm, C::kBn, C::kWgrad>;

template <class C>
__device__ int blocks_of_k(const Problem& p, const Tile& t) {
  return ((C::kWgrad ? t.end - t.begin : p.k) + kBk - 1) / kBk;
}

// One thread: fills the ring.
template <class C>
__device__ void produce(const CUtensorMap& a_map, const CUtensorMap& b_map,
                        const Problem& p, TilesOf<C> tiles, uint32_t slots,
                        Barrier* full, Barrier* empty, int rank) {
  constexpr uint16_t kAll = (1 << C::kCluster) - 1;
  Ring<C::kStages> ring;
  Tile t;
  while (tiles.next(t)) {
    const int blocks = blocks_of_k<C>(p, t);
    const int m = t.m + rank * kBm;
    // The lower block of a pair may have no rows left.
    const bool loads_a = C::kWgrad || t.begin + m < t.end;
    const uint32_t bytes = C::kBBytes + (loads_a ? C::kABytes : 0);
    for (int block = 0; block < blocks; ++block) {
      const int k = block * kBk;
      const uint32_t a = slots + ring.slot * C::kSlotBytes;
      const uint32_t b = a + C::kABytes;
      Barrier& ready = full[ring.slot];
      empty[ring.slot].wait(ring.parity() ^ 1);
      ready.arrive_expect(bytes);
      const auto load_b = [&](int offset, auto... at) {
        tma_load_multicast(b + offset, b_map, ready, kAll, at...);
      };
      // Each block of a cluster loads its share of B: of the columns where they
      // are rows of the panel, else of k.
      constexpr int kShareN = C::kBn / C::kCluster;
      constexpr int kShareK = kBk / C::kCluster;
      if constexpr (C::kWgrad) {
#pragma unroll
        for (int i = 0; i < kBm / 64; ++i) {
          tma_load(a + i * kPanelBytes, a_map, ready, m + i * 64, t.begin + k);
        }
#pragma unroll
        for (int i = 0; i < C::kBn / 64; ++i) {
          load_b(i * kPanelBytes + rank * kShareK * kPanelRowBytes,
                 t.n + i * 64, t.begin + k + rank * kShareK);
        }
      } else {
        if (loads_a) tma_load(a, a_map, ready, k, t.begin + m);
        if constexpr (C::kBMajor == kMajorK) {
          load_b(rank * kShareN * kPanelRowBytes, k, t.n + rank * kShareN,
                 t.expert);
        } else {
#pragma unroll
          for (int i = 0; i < C::kBn / 64; ++i) {
            load_b(i * kPanelBytes + rank * kShareK * kPanelRowBytes,
                   t.n + i * 64, k + rank * kShareK, t.expert);
          }
        }
      }
      ring.next();
    }
  }
}

// Two warpgroups: the sums of one tile after the other.
template <class C>
struct Consumer {
  using Sums = float[C::kBn / 2];

  const Problem& p;
  const CUtensorMap& c_map;
  uint32_t slots;    // of the ring
  uint32_t staging;  // two panels of this warpgroup
  Barrier* full;
  Barrier* empty;
  int rank;
  Ring<C::kStages> ring = {};
  uint32_t panel = 0;  // of the two

  __device__ int warpgroup() const { return threadIdx.x / 128; }
  __device__ int thread() const { return threadIdx.x % 128; }
  __device__ int lane() const { return threadIdx.x % kWarp; }
  __device__ int warp() const { return thread() / kWarp; }
  __device__ bool leads() const { return thread() == 0; }
  __device__ void sync() const { named_barrier_sync(1 + warpgroup(), 128); }

  // This warp no longer reads the slot.
  __device__ void release(int slot) {
    if (lane() < C::kCluster) empty[slot].arrive_at(lane());
  }

  __device__ void multiply(Sums& acc, int slot, int step) const {
    const uint32_t at = slots + slot * C::kSlotBytes;
    const uint64_t a = matrix_descriptor<C::kAMajor>(
        at + warpgroup() * kPanelBytes, kPanelBytes);
    const uint64_t b =
        matrix_descriptor<C::kBMajor>(at + C::kABytes, kPanelBytes);
    wgmma<C::kBn, C::kAMajor, C::kBMajor>(
        acc, a + step * kDescriptorStep<C::kAMajor>,
        b + step * kDescriptorStep<C::kBMajor>);
  }

  // Sums over `blocks` blocks of k, of whose last only `tail` rows belong to
  // the expert (wgrad; 0: all). One block's multiplies are still running when
  // the next one's are issued, so a slot is released one later.
  __device__ void sum(Sums& acc, int blocks, int tail) {
    int last = -1;
    for (int block = 0; block < blocks; ++block) {
      full[ring.slot].wait(ring.parity());
      if constexpr (C::kWgrad) {
        if (tail > 0 && block == blocks - 1) drop_rows(ring.slot, tail);
      }
      wgmma_pin(acc);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kBk / 16; ++step) {
        multiply(acc, ring.slot, step);
      }
      wgmma_commit();
      wgmma_pin(acc);
      wgmma_wait<1>();
      if (block > 0) release(last);
      last = ring.slot;
      ring.next();
    }
    wgmma_wait<0>();
    wgmma_pin(acc);
    if (blocks > 0) release(last);
  }

  // Zeroes all but the first `rows` rows of k in both operands.
  __device__ void drop_rows(int slot, int rows) const {
    constexpr int kPanels = C::kSlotBytes / kPanelBytes;
    constexpr int kAll = kConsumers * 128;
    const int pieces = (kBk - rows) * (kPanelRowBytes / 16);
    const uint32_t from = slots + slot * C::kSlotBytes + rows * kPanelRowBytes;
    for (int i = threadIdx.x % kAll; i < pieces; i += kAll) {
#pragma unroll
      for (int of = 0; of < kPanels; ++of) {
        store_shared(from + of * kPanelBytes + i * 16, uint4{0, 0, 0, 0});
      }
    }
    fence_async();
    named_barrier_sync(1 + kConsumers, kAll);
  }

  // The panel to write next, once its last store has read it.
  __device__ uint32_t take_panel() {
    if (leads()) wait_stores_read<1>();
    sync();
    panel ^= 1;
    return staging + panel * kPanelBytes;
  }

  // 64 rows of y or dx, 64 columns at a time through a panel; `rows` of them
  // are the expert's.
  __device__ void store_rows(const Sums& acc, const Tile& t, int64_t row,
                             int rows) {
    const int l = lane();
#pragma unroll
    for (int part = 0; part < C::kBn / 64; ++part) {
      const int column = t.n + part * 64;
      if (column < p.n) {
        const uint32_t to = take_panel();
        const int r = 16 * warp() + l % 16;
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          const float* v = acc + (part * 8 + j) * 4;
          store_matrices(to + panel_offset(r, j + l / 16),
                         pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                         pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
        }
        fence_async();
        sync();
        if (rows >= 64) {
          if (leads()) {
            tma_store(c_map, to, column, static_cast<int>(row));
          }
        } else {
          bf16* c = static_cast<bf16*>(p.c) + row * p.c_stride + column;
#pragma unroll
          for (int i = 0; i < 64 * 8; i += 128) {
            const int at = (i + thread()) / 8, piece = thread() % 8;
            if (at < rows && column + piece * 8 < p.n) {
              *reinterpret_cast<uint4*>(c + at * p.c_stride + piece * 8) =
                  load_shared(to + panel_offset(at, piece));
            }
          }
        }
        // A group even if empty: take_panel() counts one a panel.
        if (leads()) commit_stores();
      }
    }
  }

  // Adds 64 rows to dw[e], 32 columns at a time through a panel.
  __device__ void add_by_tma(const Sums& acc, const Tile& t, int row) {
    const int g = lane() / 4, c = lane() % 4;
    const bool odd = g & 1;
#pragma unroll
    for (int part = 0; part < C::kBn / 32; ++part) {
      const int column = t.n + part * 32;
      if (column < p.n) {
        const uint32_t to = take_panel();
        const int r = 16 * warp() + g;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          // Lanes of odd rows write blocks j and j + 2 in the other order,
          // which spreads each half warp over all banks.
          const float* v = acc + (part * 4 + j) * 4;
          const float* w = v + 2 * 4;
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            const bool second = (step == 1) != odd;
            const int piece = 2 * (j + (second ? 2 : 0)) + c / 2;
            const uint32_t at = to + panel_offset(r, piece) + c % 2 * 8;
            store_shared(at, second ? w[0] : v[0], second ? w[1] : v[1]);
            store_shared(at + 8 * kPanelRowBytes, second ? w[2] : v[2],
                         second ? w[3] : v[3]);
          }
        }
        fence_async();
        sync();
        if (leads()) {
          if (row < p.m) tma_add(c_map, to, column, row, t.expert);
          commit_stores();
        }
      }
    }
  }

  // What this warpgroup has of a tile.
  __device__ void run(const Tile& t) {
    const int blocks = blocks_of_k<C>(p, t);
    const int m = t.m + rank * kBm + warpgroup() * 64;
    const int rows = t.end - t.begin;
    Sums acc;
#pragma unroll
    for (float& x : acc) x = 0;
    if constexpr (C::kWgrad) {
      sum(acc, blocks, rows % kBk);
      add_by_tma(acc, t, m);
    } else if (m >= rows) {
      // The cluster's other block shares the slots.
      for (int block = 0; block < blocks; ++block) {
        full[ring.slot].wait(ring.parity());
        release(ring.slot);
        ring.next();
      }
    } else {
      sum(acc, blocks, 0);
      store_rows(acc, t, static_cast<int64_t>(t.begin) + m, rows - m);
    }
  }

  __device__ void run(TilesOf<C> tiles) {
    Tile t;
    while (tiles.next(t)) run(t);
    // Shared memory outlives the stores that read it.
    if (leads()) wait_stores_read<0>();
  }
};

template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ CUtensorMap a_map,
           const __grid_constant__ CUtensorMap b_map,
           const __grid_constant__ CUtensorMap c_map,
           const __grid_constant__ Problem p) {
  extern __shared__ __align__(kPanelAlign) uint8_t shared[];
  const uint32_t slots = shared_address(shared);
  const uint32_t staging = slots + C::kRingBytes;
  Barrier* const full =
      reinterpret_cast<Barrier*>(shared + C::kRingBytes + C::kStagingBytes);
  Barrier* const empty = full + C::kStages;
  uint16_t* order = nullptr;
  if (C::kWgrad && p.experts <= kMostOrdered) {
    order = reinterpret_cast<uint16_t*>(empty + C::kStages);
    order_experts(p, order);
  }
  const int rank = static_cast<int>(cluster_rank());
  const int warpgroup = threadIdx.x / 128;

  if (threadIdx.x == 0) {
    prefetch_map(a_map);
    prefetch_map(b_map);
    prefetch_map(c_map);
    for (int i = 0; i < C::kStages; ++i) {
      full[i].init(1);
      // By each warp that reads the slot.
      empty[i].init(C::kCluster * 128 / kWarp * kConsumers);
    }
    fence_barriers();
  }
  cluster_sync();

  const TilesOf<C> tiles(p, order, blockIdx.x / C::kCluster,
                         gridDim.x / C::kCluster);
  if (warpgroup == kConsumers) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == kConsumers * 128) {
      produce<C>(a_map, b_map, p, tiles, slots, full, empty, rank);
    }
    __syncwarp();
  } else {
    take_registers<kConsumerRegisters>();
    Consumer<C> consumer{
        p,    c_map, slots, staging + warpgroup * 2 * kPanelBytes,
        full, empty, rank};
    consumer.run(tiles);
    __syncwarp();
  }
  // The other block may still write here, or arrive.
  cluster_sync();
}

// `group`: most tiles (of a whole cluster) in a group.
template <class C>
void launch(const GroupedMatmulArguments& x, int group, cudaStream_t stream) {
  constexpr CUtensorMapDataType kBf16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  constexpr bool kForward = C::kPass == GroupedMatmulPass::kForward;
  const int64_t m = C::kWgrad ? x.f : x.rows;
  const int64_t n = kForward ? x.f : x.d;
  const int64_t k = C::kWgrad ? x.rows : kForward ? x.d : x.f;
  constexpr int kShareK = kBk / C::kCluster;
  CUtensorMap a, b, c;
  if constexpr (C::kWgrad) {
    a = tensor_map(kBf16, x.a, {m, k}, {x.a_stride * 2}, {64, kBk});
    b = tensor_map(kBf16, x.b, {n, k}, {x.b_stride * 2}, {64, kShareK});
    c = tensor_map(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, x.c, {n, m, x.experts},
                   {x.c_stride * 4, x.c_expert * 4}, {32, 64, 1});
  } else {
    a = tensor_map(kBf16, x.a, {k, m}, {x.a_stride * 2}, {kBk, kBm});
    b = tensor_map(kBf16, x.b, {x.d, x.f, x.experts},
                   {x.b_stride * 2, x.b_expert * 2},
                   {64, kForward ? C::kBn / C::kCluster : kShareK, 1});
    c = tensor_map(kBf16, x.c, {n, m}, {x.c_stride * 2}, {64, 64});
  }
  const Problem p{x.offsets,
                  static_cast<int>(x.experts),
                  static_cast<int>(x.f),
                  static_cast<int>(n),
                  static_cast<int>(k),
                  group,
                  x.c,
                  x.c_stride,
                  x.c_expert};

  CHECK(cudaFuncSetAttribute(kernel<C>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                             C::kSharedBytes) == cudaSuccess);
  cudaLaunchConfig_t config = {};
  config.gridDim = multiprocessors() / C::kCluster * C::kCluster;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = C::kSharedBytes;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {C::kCluster, 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  (void)cudaLaunchKernelEx(&config, kernel<C>, a, b, c, p);
  check_launch("grouped_matmul");
}

}  // namespace grouped_matmul_wgmma
}  // namespace tapeline::cuda
