// Plain: 16 heads of a query by tiles of 64 of its keys, in Accumulator<T>,
// right at any size.
#include "kernels/cuda_tile.cuh"
#include "kernels/indexer_loss/indexer_loss_cuda.h"
#include "kernels/indexer_loss/indexer_loss_row.cuh"
#include "kernels/indexer_loss/indexer_loss_wgmma.h"

namespace tapeline::cuda {
namespace {

using loss_detail::kl_row;
using loss_detail::normalise_row;

// A row in dynamic shared memory.
template <class A>
using Row = loss_detail::Row<A, int32_t>;
template <class A>
size_t row_bytes(int64_t slots) {
  return static_cast<size_t>(slots) * (2 * sizeof(A) + sizeof(int32_t));
}

// What makes the scores of a query's heads with keys.
template <class T>
struct Side {
  Rows<const T, 3> q;
  Rows<const T, 2> k;
  Rows<const Accumulator<T>, 2> per_head;  // w, or lse
  Accumulator<T> scale;
};

// The sum over the heads of query t of join(sum, term(score, per head)), for
// the key that this thread has in the tile, if it has one.
template <class T, class Term, class Join>
__device__ Accumulator<T> sum_heads(const Side<T>& side, int64_t t,
                                    const SelectedTiles& keys, int count,
                                    Coefficients<Accumulator<T>>& x, Term term,
                                    Join join) {
  using A = Accumulator<T>;
  const int m = threadIdx.x / 16, n = threadIdx.x % 16;
  const int64_t heads = side.q.size[1];
  A sum = 0;
  for (int64_t h = 0; h < heads; h += kRowsOfDots) {
    const HeadTile tile{t, h,
                        static_cast<int>(min(int64_t{kRowsOfDots}, heads - h))};
    A score[4];
    dots(side.q.size[2], heads_of(side.q, tile), keys_of(side.k, keys, count),
         score);
    const A value = m < tile.heads ? side.per_head(t, h + m) : A(0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[n + 16 * i][m] = term(mul(score[i], side.scale), value);
    }
    __syncthreads();
    if (threadIdx.x < kTile) {
      for (int i = 0; i < tile.heads; ++i) {
        sum = join(sum, x[threadIdx.x][i], side.per_head(t, h + i));
      }
    }
    __syncthreads();
  }
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kTileThreads)
    indexer_loss_forward_kernel(Side<T> index, Side<T> attention,
                                Rows<const int32_t, 2> ids,
                                Rows<Accumulator<T>, 1> loss,
                                Rows<Accumulator<T>, 2> dscore,
                                Rows<Accumulator<T>, 2> target) {
  using A = Accumulator<T>;
  extern __shared__ double row_memory[];
  __shared__ SelectedTiles::Shared selected;
  __shared__ alignas(16) Coefficients<A> x;
  const int64_t t = blockIdx.x, slots = ids.size[1];
  A* const scores = reinterpret_cast<A*>(row_memory);
  A* const targets = scores + slots;
  int32_t* const from = reinterpret_cast<int32_t*>(targets + slots);
  SelectedTiles keys(selected, ids.row(t), slots);
  int all = 0;
  while (const int count = keys.next()) {
    const A score = sum_heads(
        index, t, keys, count, x,
        [](A score, A) { return score < 0 ? A(0) : score; },
        [](A sum, A term, A weight) { return fma(weight, term, sum); });
    const A probability = sum_heads(
        attention, t, keys, count, x,
        [](A score, A norm) { return exp(score - norm); },
        [](A sum, A term, A) { return sum + term; });
    const int j = threadIdx.x;
    if (j < count) {
      scores[all + j] = score;
      targets[all + j] = probability;
      from[all + j] = keys.slot(j);
    }
    all += count;
  }
  __syncthreads();
  const Row<A> row{scores, targets, from, all};
  normalise_row<kTileThreads>(row, attention.q.size[1], slots,
                              target.data == nullptr ? nullptr : target.row(t));
  kl_row<kTileThreads>(row, slots, &loss(t), dscore.row(t));
}

template <class A>
__global__ void __launch_bounds__(kTileThreads)
    indexer_loss_kl_kernel(Rows<const A, 2> score, Rows<const A, 2> target,
                           Rows<const int32_t, 2> ids, Rows<A, 1> loss,
                           Rows<A, 2> dscore) {
  extern __shared__ double row_memory[];
  __shared__ SelectedTiles::Shared selected;
  const int64_t t = blockIdx.x, slots = ids.size[1];
  A* const scores = reinterpret_cast<A*>(row_memory);
  A* const targets = scores + slots;
  int32_t* const from = reinterpret_cast<int32_t*>(targets + slots);
  SelectedTiles keys(selected, ids.row(t), slots);
  int all = 0;
  while (const int count = keys.next()) {
    const int j = threadIdx.x;
    if (j < count) {
      const int32_t slot = keys.slot(j);
      scores[all + j] = score(t, slot);
      targets[all + j] = target(t, slot);
      from[all + j] = slot;
    }
    all += count;
  }
  __syncthreads();
  kl_row<kTileThreads>(Row<A>{scores, targets, from, all}, slots, &loss(t),
                       dscore.row(t));
}

// --- backward ----------------------------------------------------------------

// dq and dw of sixteen heads of a query.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    indexer_loss_backward_queries_kernel(Rows<const Accumulator<T>, 2> dscore,
                                         Rows<const Accumulator<T>, 1> dloss,
                                         Side<T> index,
                                         Rows<const int32_t, 2> ids,
                                         Rows<T, 3> dq,
                                         Rows<Accumulator<T>, 2> dw) {
  using A = Accumulator<T>;
  __shared__ SelectedTiles::Shared selected;
  __shared__ alignas(16) Coefficients<A> ds;
  const HeadTile tile = HeadTile::of_block(index.q.size[1]);
  const int m = threadIdx.x / 16, n = threadIdx.x % 16;
  const int64_t dim = index.q.size[2];
  const A weight = m < tile.heads
                       ? index.per_head(tile.t, tile.first + m) * index.scale
                       : A(0);
  SelectedTiles keys(selected, ids.row(tile.t), ids.size[1]);
  A sum[kColumns][kRowsOfDots] = {};
  A dw_sum = 0;
  while (const int count = keys.next()) {
    A x[4];
    dots(dim, heads_of(index.q, tile), keys_of(index.k, keys, count), x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = n + 16 * i;
      const A score = mul(x[i], index.scale);
      const bool open = j < count && score > 0;
      const A g = open ? dloss(tile.t) * dscore(tile.t, keys.slot(j)) : A(0);
      if (open) dw_sum += g * score;
      ds[j][m] = open ? g * weight : A(0);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int64_t column = threadIdx.x + i * kTileThreads;
      if (column >= dim) break;
      for (int j = 0; j < count; ++j) {
        add_rows(ds[j], A(load(index.k(keys.id(j), column))), sum[i]);
      }
    }
  }
  dw_sum = row_sum(dw_sum);
  if (n == 0 && m < tile.heads) dw(tile.t, tile.first + m) = dw_sum;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int64_t column = threadIdx.x + i * kTileThreads;
    if (column >= dim) break;
#pragma unroll
    for (int r = 0; r < kRowsOfDots; ++r) {
      if (r < tile.heads) store(dq(tile.t, tile.first + r, column), sum[i][r]);
    }
  }
}

// dk of one key: its entries in order, and heads within an entry. Each thread
// makes the ds of one (entry, head), recomputing q . k with the bits it had.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    indexer_loss_backward_keys_kernel(Rows<const Accumulator<T>, 2> dscore,
                                      Rows<const Accumulator<T>, 1> dloss,
                                      Side<T> index,
                                      Rows<const int32_t, 1> offsets,
                                      Rows<const int32_t, 1> entries,
                                      int32_t slots, Rows<T, 2> dk) {
  using A = Accumulator<T>;
  __shared__ A key[kMaxWidth], ds[kTileThreads];
  __shared__ const T* queries[kTileThreads];
  const int64_t s = blockIdx.x, dim = index.q.size[2], heads = index.q.size[1];
  const int64_t begin = offsets(s), rows = (offsets(s + 1) - begin) * heads;
  for (int64_t d = threadIdx.x; d < dim; d += kTileThreads) {
    key[d] = load(index.k(s, d));
  }
  A sum[kColumns] = {};
  for (int64_t first = 0; first < rows; first += kTileThreads) {
    __syncthreads();
    const int64_t row = first + threadIdx.x;
    if (row < rows) {
      const int32_t entry = entries(begin + row / heads);
      const int64_t h = row % heads, t = entry / slots;
      const T* query = &index.q(t, h, 0);
      A x = 0;
#pragma unroll 4
      for (int64_t d = 0; d < dim; ++d) x = fma(A(load(query[d])), key[d], x);
      const A g = dloss(t) * dscore(t, entry - t * slots);
      const A weight = index.per_head(t, h) * index.scale;
      ds[threadIdx.x] = mul(x, index.scale) > 0 ? g * weight : A(0);
      queries[threadIdx.x] = query;
    }
    __syncthreads();
    const int count =
        static_cast<int>(min(int64_t{kTileThreads}, rows - first));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int64_t column = threadIdx.x + i * kTileThreads;
      if (column >= dim) break;
#pragma unroll 4
      for (int r = 0; r < count; ++r) {
        sum[i] = fma(ds[r], A(load(queries[r][column])), sum[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int64_t column = threadIdx.x + i * kTileThreads;
    if (column < dim) store(dk(s, column), sum[i]);
  }
}

// Rows of many slots need more shared memory than a kernel has unasked.
template <class Kernel>
void allow_bytes(Kernel kernel, size_t bytes, const char* op) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(bytes));
  CHECK(error == cudaSuccess)
      << "[" << op << "] " << bytes
      << " bytes for a row: " << cudaGetErrorString(error);
}

template <class T>
bool aligned(const View<T>& x) {
  bool all = reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  for (int i = 0; i + 1 < x.rank(); ++i) {
    all = all && (x.size(i) <= 1 || x.strides[i] % 8 == 0);
  }
  return all;
}

template <class T>
IndexerLossOperands operands(const View<const T>& q_THD,
                             const View<const T>& k_SD,
                             const View<const int32_t>& ids_TK, double scale) {
  return {std::is_same_v<T, bf16>,
          q_THD.size(1),
          q_THD.size(2),
          k_SD.size(0),
          ids_TK.size(1),
          scale,
          aligned(q_THD) && aligned(k_SD)};
}

IndexerLossPlan plan_of(const View<const bf16>& q_THD,
                        const View<const bf16>& k_SD,
                        const View<const int32_t>& ids_TK) {
  return indexer_loss_plan(q_THD.size(0), k_SD.size(0), k_SD.size(1),
                           ids_TK.size(1));
}

}  // namespace

template <class T>
void indexer_loss_forward(Launch l, View<const T> qI_THD, View<const T> kI_SD,
                          View<const Accumulator<T>> w_TH, double index_scale,
                          View<const T> q_THD, View<const T> kv_SD,
                          View<const Accumulator<T>> lse_TH,
                          double attention_scale, View<const int32_t> ids_TK,
                          View<Accumulator<T>> loss_T,
                          View<Accumulator<T>> dscore_TK,
                          View<Accumulator<T>> target_TK) {
  using A = Accumulator<T>;
  const auto blocks = static_cast<unsigned>(qI_THD.size(0));
  if (blocks == 0) return;
  if constexpr (std::is_same_v<T, bf16>) {
    IndexerLossOperands x = operands<T>(qI_THD, kI_SD, ids_TK, index_scale);
    x.aligned = x.aligned && aligned(q_THD) && aligned(kv_SD);
    if (indexer_loss_forward_path(x, q_THD.size(1), q_THD.size(2)) ==
        IndexerLossPath::kWgmma) {
      return indexer_loss_forward_wgmma(l, qI_THD, kI_SD, w_TH, index_scale,
                                        q_THD, kv_SD, lse_TH, attention_scale,
                                        ids_TK, loss_T, dscore_TK, target_TK);
    }
  }
  const size_t bytes = row_bytes<A>(ids_TK.size(1));
  allow_bytes(indexer_loss_forward_kernel<T>, bytes, "indexer_loss");
  indexer_loss_forward_kernel<T><<<blocks, kTileThreads, bytes, stream_of(l)>>>(
      Side<T>{rows<3>(qI_THD), rows<2>(kI_SD), rows<2>(w_TH),
              static_cast<A>(index_scale)},
      Side<T>{rows<3>(q_THD), rows<2>(kv_SD), rows<2>(lse_TH),
              static_cast<A>(attention_scale)},
      rows<2>(ids_TK), rows<1>(loss_T), rows<2>(dscore_TK),
      target_TK ? rows<2>(target_TK) : Rows<A, 2>{});
  check_launch("indexer_loss_forward");
}

template <class A>
void indexer_kl(Launch l, View<const A> scores_TK, View<const A> target_TK,
                View<const int32_t> ids_TK, View<A> loss_T, View<A> dscore_TK) {
  const auto blocks = static_cast<unsigned>(ids_TK.size(0));
  if (blocks == 0) return;
  const size_t bytes = row_bytes<A>(ids_TK.size(1));
  allow_bytes(indexer_loss_kl_kernel<A>, bytes, "indexer_kl");
  indexer_loss_kl_kernel<A><<<blocks, kTileThreads, bytes, stream_of(l)>>>(
      rows<2>(scores_TK), rows<2>(target_TK), rows<2>(ids_TK), rows<1>(loss_T),
      rows<2>(dscore_TK));
  check_launch("indexer_kl");
}

template <class T>
size_t indexer_loss_backward_workspace_bytes(const View<const T>& qI_THD,
                                             const View<const T>& kI_SD,
                                             const View<const int32_t>& ids_TK,
                                             double index_scale) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (indexer_loss_backward_path(operands<T>(
            qI_THD, kI_SD, ids_TK, index_scale)) == IndexerLossPath::kWgmma) {
      return plan_of(qI_THD, kI_SD, ids_TK).bytes;
    }
  }
  return 0;
}

template <class T>
void indexer_loss_backward(Launch l, View<const Accumulator<T>> dscore_TK,
                           View<const Accumulator<T>> dloss_T,
                           View<const T> qI_THD, View<const T> kI_SD,
                           View<const Accumulator<T>> w_TH, double index_scale,
                           View<const int32_t> ids_TK,
                           View<const int32_t> inverse_offsets_S1,
                           View<const int32_t> inverse_entries, View<T> dqI_THD,
                           View<T> dkI_SD, View<Accumulator<T>> dw_TH,
                           std::byte* workspace) {
  if constexpr (std::is_same_v<T, bf16>) {
    IndexerLossOperands x = operands<T>(qI_THD, kI_SD, ids_TK, index_scale);
    x.aligned = x.aligned && aligned(dqI_THD) && aligned(dkI_SD);
    if (indexer_loss_backward_path(x) == IndexerLossPath::kWgmma) {
      return indexer_loss_backward_wgmma(
          l, plan_of(qI_THD, kI_SD, ids_TK), dscore_TK, dloss_T, qI_THD, kI_SD,
          w_TH, index_scale, ids_TK, inverse_offsets_S1, inverse_entries,
          dqI_THD, dkI_SD, dw_TH, workspace);
    }
  }
  const Side<T> index{rows<3>(qI_THD), rows<2>(kI_SD), rows<2>(w_TH),
                      static_cast<Accumulator<T>>(index_scale)};
  const int64_t queries =
      qI_THD.size(0) * ceil_div(qI_THD.size(1), kRowsOfDots);
  if (queries > 0) {
    indexer_loss_backward_queries_kernel<T>
        <<<static_cast<unsigned>(queries), kTileThreads, 0, stream_of(l)>>>(
            rows<2>(dscore_TK), rows<1>(dloss_T), index, rows<2>(ids_TK),
            rows<3>(dqI_THD), rows<2>(dw_TH));
    check_launch("indexer_loss_backward");
  }
  const auto keys = static_cast<unsigned>(kI_SD.size(0));
  if (keys == 0) return;
  indexer_loss_backward_keys_kernel<T><<<keys, kTileThreads, 0, stream_of(l)>>>(
      rows<2>(dscore_TK), rows<1>(dloss_T), index, rows<1>(inverse_offsets_S1),
      rows<1>(inverse_entries), static_cast<int32_t>(ids_TK.size(1)),
      rows<2>(dkI_SD));
  check_launch("indexer_loss_backward");
}

#define TAPELINE_INDEXER_LOSS(T)                                               \
  template void indexer_loss_forward<T>(                                       \
      Launch, View<const T>, View<const T>, View<const Accumulator<T>>,        \
      double, View<const T>, View<const T>, View<const Accumulator<T>>,        \
      double, View<const int32_t>, View<Accumulator<T>>, View<Accumulator<T>>, \
      View<Accumulator<T>>);                                                   \
  template void indexer_loss_backward<T>(                                      \
      Launch, View<const Accumulator<T>>, View<const Accumulator<T>>,          \
      View<const T>, View<const T>, View<const Accumulator<T>>, double,        \
      View<const int32_t>, View<const int32_t>, View<const int32_t>, View<T>,  \
      View<T>, View<Accumulator<T>>, std::byte*);                              \
  template size_t indexer_loss_backward_workspace_bytes<T>(                    \
      const View<const T>&, const View<const T>&, const View<const int32_t>&,  \
      double);
TAPELINE_INDEXER_LOSS(float)
TAPELINE_INDEXER_LOSS(bf16)
TAPELINE_INDEXER_LOSS(double)
#undef TAPELINE_INDEXER_LOSS

template void indexer_kl<float>(Launch, View<const float>, View<const float>,
                                View<const int32_t>, View<float>, View<float>);
template void indexer_kl<double>(Launch, View<const double>, View<const double>,
                                 View<const int32_t>, View<double>,
                                 View<double>);

}  // namespace tapeline::cuda
