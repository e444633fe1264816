#include <bit>
#include <cmath>
#include <limits>

#include "kernels/cuda_dispatch.h"
#include "kernels/top_k/top_k.h"
#include "kernels/top_k/top_k_cuda.h"

namespace tapeline {
namespace {

// Numbers in the order of their values: adjacent integers are adjacent floats.
// NaNs lie outside of [-inf, inf]. Its own inverse.
template <class I>
I reorder(I bits) {
  return bits < 0 ? bits ^ std::numeric_limits<I>::max() : bits;
}
template <class S>
using Bits = std::conditional_t<std::is_same_v<S, double>, int64_t, int32_t>;
template <class S>
Bits<S> to_order(S x) {
  return reorder(std::bit_cast<Bits<S>>(x));
}
template <class S>
S from_order(Bits<S> order) {
  return std::bit_cast<S>(reorder(order));
}

template <class S>
int64_t count_at_least(const S* x, int64_t n, S threshold) {
  Bits<S> count = 0;
#pragma omp simd reduction(+ : count)
  for (int64_t i = 0; i < n; ++i) count += x[i] >= threshold ? 1 : 0;
  return count;
}

// What is taken from one row: everything above `threshold`, the first `equal`
// elements at it, the first `nans` NaNs.
template <class S>
struct Selection {
  S threshold;
  int64_t equal, nans;
};

template <class S>
Selection<S> select(const S* x, int64_t n, int64_t k) {
  constexpr S kInfinity = std::numeric_limits<S>::infinity();
  constexpr S kLowest = std::numeric_limits<S>::lowest();
  const int64_t numbers = count_at_least(x, n, kLowest);
  if (numbers <= k) return {-kInfinity, 0, k - numbers};
  // The largest threshold that at least k elements reach: the k-th largest
  // value. Stops early at any threshold that exactly k reach.
  Bits<S> low = to_order(kLowest), high = to_order(kInfinity);
  int64_t reached = numbers;  // by low
  while (low < high && reached != k) {
    // Half the distance, rounded up, without overflow.
    using U = std::make_unsigned_t<Bits<S>>;
    const U distance = static_cast<U>(high) - static_cast<U>(low);
    const auto middle =
        static_cast<Bits<S>>(static_cast<U>(low) + (distance - distance / 2));
    const int64_t count = count_at_least(x, n, from_order<S>(middle));
    if (count >= k) {
      low = middle;
      reached = count;
    } else {
      high = middle - 1;
    }
  }
  const S threshold = from_order<S>(low);
  int64_t above = 0;
  for (int64_t i = 0; i < n; ++i) above += x[i] > threshold ? 1 : 0;
  return {threshold, k - above, 0};
}

template <class S>
void top_k_row(const S* scores, int64_t begin, int64_t end, int64_t k,
               int32_t* ids) {
  const int64_t n = end > begin ? end - begin : 0;
  const S* x = scores + begin;
  Selection<S> s = select(x, n, k);
  int64_t taken = 0;
  for (int64_t i = 0; i < n && taken < k; ++i) {
    const bool equal = x[i] == s.threshold && s.equal > 0;
    const bool nan = x[i] != x[i] && s.nans > 0;
    s.equal -= equal;
    s.nans -= nan;
    ids[taken] = static_cast<int32_t>(begin + i);
    taken += (x[i] > s.threshold) | equal | nan;
  }
  for (; taken < k; ++taken) ids[taken] = -1;
}

}  // namespace

template <class S>
void top_k(Launch l, View<const S> scores_NS, KeyRange range, int k,
           View<int32_t> ids_NK) {
  if (l.dry) return;
  CHECK(scores_NS.rank() == 2 && ids_NK.rank() == 2 && k >= 0 &&
        scores_NS.size(0) == ids_NK.size(0) && ids_NK.size(1) == k &&
        dense_rows(scores_NS) && dense_rows(ids_NK))
      << "[top_k] shapes: scores is " << describe(scores_NS) << ", ids is "
      << describe(ids_NK) << ", k is " << k;
  const int64_t rows = scores_NS.size(0), keys = scores_NS.size(1);
  const bool whole = !range.begin && !range.end;
  if (!whole) check_key_range_shapes("top_k", range, rows);
  if (kCuda && l.on_cuda()) {
    return cuda::top_k(l, scores_NS, range, k, ids_NK);
  }
  if (!whole) check_key_ranges("top_k", range, rows, keys);
  l.threads->parallel_for(
      rows, rows_per_chunk(keys), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
          top_k_row(scores_NS.data + i * scores_NS.strides[0],
                    whole ? 0 : range.begin(i), whole ? keys : range.end(i), k,
                    ids_NK.data + i * ids_NK.strides[0]);
        }
      });
}

template void top_k<float>(Launch, View<const float>, KeyRange, int,
                           View<int32_t>);
template void top_k<double>(Launch, View<const double>, KeyRange, int,
                            View<int32_t>);

}  // namespace tapeline
