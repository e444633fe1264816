// Radix select, one block a row: with a pass for each eight bits of a score,
// find the k-th largest; one more pass emits ids in ascending order.
#include <limits>

#include "kernels/cuda.cuh"
#include "kernels/top_k/top_k_cuda.h"
#include "kernels/top_k/top_k_radix.h"

namespace tapeline::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kDigit = 256;

// Scores as whole numbers in the order of their values: no candidate (-inf) is
// 0, NaN 1, and what is above that is a number.
template <class S>
struct Order;
template <>
struct Order<float> {
  using Key = unsigned;
  static constexpr int kBits = 32;
  __device__ static Key bits(float x) { return __float_as_uint(x); }
};
template <>
struct Order<double> {
  using Key = unsigned long long;
  static constexpr int kBits = 64;
  __device__ static Key bits(double x) {
    return static_cast<Key>(__double_as_longlong(x));
  }
};
template <class S>
__device__ typename Order<S>::Key key_of(S x) {
  using Key = typename Order<S>::Key;
  constexpr Key kSign = Key{1} << (Order<S>::kBits - 1);
  if (x != x) return 1;
  if (x < std::numeric_limits<S>::lowest()) return 0;
  if (x == 0) return kSign;  // of either sign
  const Key bits = Order<S>::bits(x);
  return bits & kSign ? ~bits : bits | kSign;
}

// One row's scores.
template <class S>
struct Row {
  using Key = typename Order<S>::Key;
  const S* x;
  int64_t n;

  __device__ Key key(int64_t i) const { return i < n ? key_of(x[i]) : 0; }
};

// How many threads before this one, and in all, have `a` and `b`. `parts`
// alternates between two arrays, so that one barrier is enough.
struct Counts {
  int a, b;
};
__device__ Counts count_before(bool a, bool b, Counts* parts, Counts& total) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const unsigned below = (1u << lane) - 1;
  const unsigned with_a = __ballot_sync(~0u, a), with_b = __ballot_sync(~0u, b);
  if (lane == 0) parts[warp] = {__popc(with_a), __popc(with_b)};
  __syncthreads();
  Counts before = {__popc(with_a & below), __popc(with_b & below)};
  total = {0, 0};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const Counts part = parts[w];
    if (w < warp) {
      before.a += part.a;
      before.b += part.b;
    }
    total.a += part.a;
    total.b += part.b;
  }
  return before;
}

// The k-th largest key of the row's candidates, and how many of those that
// equal it are taken: from 0, all of them, where there are no more than k.
template <class S>
struct Selection {
  typename Order<S>::Key threshold;
  int64_t equal;
};

template <class S>
__device__ Selection<S> select(const Row<S>& row, int64_t k) {
  using Key = typename Order<S>::Key;
  __shared__ int histogram[kDigit];
  __shared__ int chosen_digit, chosen_above;
  const int thread = threadIdx.x;
  Key prefix = 0;    // the digits found so far
  int64_t rest = k;  // to be taken among those that have the prefix
  for (int shift = Order<S>::kBits - 8; shift >= 0; shift -= 8) {
    for (int i = thread; i < kDigit; i += kThreads) histogram[i] = 0;
    if (thread == 0) chosen_digit = -1;
    __syncthreads();
    for (int64_t first = 0; first < row.n; first += kThreads) {
      const Key key = row.key(first + thread);
      // In two steps: no shift may be as wide as the key.
      const bool same = key >> shift >> 8 == prefix;
      const int digit =
          key != 0 && same ? static_cast<int>(key >> shift & 0xff) : -1;
      // Equal scores, thousands of zeros say, are added together.
      const unsigned equal = __match_any_sync(~0u, digit);
      const int lane = thread % kWarp;
      if (digit >= 0 && (equal & ((1u << lane) - 1)) == 0) {
        atomicAdd(&histogram[digit], __popc(equal));
      }
    }
    __syncthreads();
    // The digit at which the count from above reaches `rest`.
    if (thread < kDigit) {
      int above = 0;
      for (int d = kDigit - 1; d > thread; --d) above += histogram[d];
      if (above < rest && rest <= above + histogram[thread]) {
        chosen_digit = thread;
        chosen_above = above;
      }
    }
    __syncthreads();
    // Only ever at the first digit: fewer candidates than k.
    if (chosen_digit < 0) return {0, 0};
    prefix = prefix << 8 | static_cast<Key>(chosen_digit);
    rest -= chosen_above;
    __syncthreads();
  }
  return {prefix, rest};
}

template <class S>
__global__ void __launch_bounds__(kThreads)
    top_k_row(Rows<const S, 2> scores, Rows<const int32_t, 1> range_begin,
              Rows<const int32_t, 1> range_end, int64_t k,
              Rows<int32_t, 2> ids_NK) {
  __shared__ Counts parts[2][kWarps];
  const int64_t i = blockIdx.x;
  const bool whole = range_begin.data == nullptr;
  const int64_t begin = whole ? 0 : range_begin(i);
  const int64_t end = whole ? scores.size[1] : range_end(i);
  const Row<S> row{scores.row(i) + begin, end > begin ? end - begin : 0};
  int32_t* ids = ids_NK.row(i);
  int64_t taken = 0, equal_seen = 0;
  if (row.n > 0) {
    const Selection<S> s = select(row, k);
    int which = 0;
    for (int64_t first = 0; first < row.n && taken < k; first += kThreads) {
      const int64_t at = first + threadIdx.x;
      const auto key = row.key(at);
      const bool above = key > s.threshold, equal = key == s.threshold;
      Counts total;
      const Counts before = count_before(above, equal, parts[which], total);
      which = 1 - which;
      // Of those that equal the threshold the first are taken.
      const int64_t left = s.equal - equal_seen;  // negative: none
      const int64_t equal_before =
          max(int64_t{0}, min(int64_t{before.b}, left));
      if (above || (equal && before.b < left)) {
        ids[taken + before.a + equal_before] = static_cast<int32_t>(begin + at);
      }
      taken += total.a + max(int64_t{0}, min(int64_t{total.b}, left));
      equal_seen += total.b;
    }
  }
  for (int64_t at = taken + threadIdx.x; at < k; at += kThreads) ids[at] = -1;
}

}  // namespace

template <class S>
void top_k(Launch l, View<const S> scores_NS, KeyRange range, int k,
           View<int32_t> ids_NK) {
  const auto blocks = static_cast<unsigned>(scores_NS.size(0));
  if (blocks == 0 || k == 0) return;
  if constexpr (std::is_same_v<S, float>) {
    const TopKPlan plan = top_k_plan(true, scores_NS.size(1), k);
    if (plan.radix) return top_k_radix(l, plan, scores_NS, range, k, ids_NK);
  }
  const bool whole = !range.begin && !range.end;
  const auto ends = [&](const View<const int32_t>& x) {
    return whole ? Rows<const int32_t, 1>{} : rows<1>(x);
  };
  top_k_row<S><<<blocks, kThreads, 0, stream_of(l)>>>(
      rows<2>(scores_NS), ends(range.begin), ends(range.end), k,
      rows<2>(ids_NK));
  check_launch("top_k");
}

template void top_k<float>(Launch, View<const float>, KeyRange, int,
                           View<int32_t>);
template void top_k<double>(Launch, View<const double>, KeyRange, int,
                            View<int32_t>);

}  // namespace tapeline::cuda
