// Plain: 64 queries by 64 keys, one head after the other, in Accumulator<T>,
// right at any size.
#include "kernels/cuda_tile.cuh"
#include "kernels/indexer/indexer_cuda.h"
#include "kernels/indexer/indexer_wgmma.h"
#include "kernels/top_k/top_k.h"

namespace tapeline::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kTileThreads)
    indexer_score_tile_kernel(Rows<const T, 3> q, Rows<const T, 2> k,
                              Rows<const Accumulator<T>, 2> w,
                              Rows<const int32_t, 1> begin,
                              Rows<const int32_t, 1> end, Accumulator<T> scale,
                              Rows<Accumulator<T>, 2> scores) {
  using A = Accumulator<T>;
  const int64_t tokens = q.size[0], keys = k.size[0];
  const int64_t tiles_s = ceil_div(keys, kTile);
  const int64_t t0 = blockIdx.x / tiles_s * kTile;
  const int64_t s0 = blockIdx.x % tiles_s * kTile;
  const int64_t mine = t0 + threadIdx.x;
  const bool sees =
      threadIdx.x < kTile && mine < tokens &&
      max(int64_t{begin(mine)}, s0) < min(int64_t{end(mine)}, s0 + kTile);
  const bool needed = __syncthreads_or(sees);
  A score[Tile<A>::kEach][Tile<A>::kEach] = {};
  for (int64_t h = 0; needed && h < q.size[1]; ++h) {
    Tile<A> dot;
    dot.add(
        q.size[2], true,
        [&](int i, int64_t d) {
          return t0 + i < tokens ? A(load(q(t0 + i, h, d))) : A(0);
        },
        true,
        [&](int j, int64_t d) {
          return s0 + j < keys ? A(load(k(s0 + j, d))) : A(0);
        });
#pragma unroll
    for (int i = 0; i < dot.kEach; ++i) {
      const int64_t t = t0 + dot.row(i);
      const A weight = t < tokens ? w(t, h) : A(0);
#pragma unroll
      for (int j = 0; j < dot.kEach; ++j) {
        const A x = mul(dot.at[i][j], scale);
        score[i][j] = fma(weight, x < 0 ? A(0) : x, score[i][j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < Tile<A>::kEach; ++i) {
    const int64_t t = t0 + Tile<A>::row(i);
    if (t >= tokens) continue;
    const int64_t first = begin(t), last = end(t);
#pragma unroll
    for (int j = 0; j < Tile<A>::kEach; ++j) {
      const int64_t s = s0 + Tile<A>::column(j);
      if (s >= keys) continue;
      scores(t, s) = first <= s && s < last ? score[i][j] : -infinity<A>();
    }
  }
}

}  // namespace

template <class T>
void indexer_scores(Launch l, View<const T> q_THD, View<const T> k_SD,
                    View<const Accumulator<T>> w_TH, KeyRange range,
                    double scale, View<Accumulator<T>> scores_TS) {
  const int64_t blocks =
      ceil_div(q_THD.size(0), kTile) * ceil_div(k_SD.size(0), kTile);
  if (blocks == 0) return;
  if constexpr (std::is_same_v<T, bf16>) {
    const IndexerPlan plan = indexer_plan(q_THD, k_SD, scale);
    if (plan.wgmma) {
      return indexer_scores_wgmma(l, plan, q_THD, k_SD, w_TH, range, scale,
                                  scores_TS);
    }
  }
  indexer_score_tile_kernel<T>
      <<<static_cast<unsigned>(blocks), kTileThreads, 0, stream_of(l)>>>(
          rows<3>(q_THD), rows<2>(k_SD), rows<2>(w_TH), rows<1>(range.begin),
          rows<1>(range.end), static_cast<Accumulator<T>>(scale),
          rows<2>(scores_TS));
  check_launch("indexer_scores");
}

template <class T>
void indexer_select(Launch l, View<const T> q_THD, View<const T> k_SD,
                    View<const Accumulator<T>> w_TH, KeyRange range,
                    double scale, int selected, View<int32_t> ids_TK,
                    std::byte* workspace, int64_t rows) {
  using A = Accumulator<T>;
  const int64_t tokens = q_THD.size(0), keys = k_SD.size(0);
  for (int64_t first = 0; first < tokens; first += rows) {
    const int64_t last = std::min(first + rows, tokens);
    const View<A> scores(reinterpret_cast<A*>(workspace), {last - first, keys});
    const KeyRange ranges = {range.begin.slice(0, first, last),
                             range.end.slice(0, first, last)};
    indexer_scores<T>(l, q_THD.slice(0, first, last), k_SD,
                      w_TH.slice(0, first, last), ranges, scale, scores);
    tapeline::top_k<A>(l, scores, ranges, selected,
                       ids_TK.slice(0, first, last));
  }
}

#define TAPELINE_INDEXER(T)                                             \
  template void indexer_scores<T>(Launch, View<const T>, View<const T>, \
                                  View<const Accumulator<T>>, KeyRange, \
                                  double, View<Accumulator<T>>);        \
  template void indexer_select<T>(                                      \
      Launch, View<const T>, View<const T>, View<const Accumulator<T>>, \
      KeyRange, double, int, View<int32_t>, std::byte*, int64_t);
TAPELINE_INDEXER(float)
TAPELINE_INDEXER(bf16)
TAPELINE_INDEXER(double)
#undef TAPELINE_INDEXER

}  // namespace tapeline::cuda
