#include <algorithm>

#include "kernels/aux_loss/aux_loss_cuda.h"
#include "kernels/cuda_rows.cuh"
#include "kernels/router/router.h"

namespace tapeline::cuda {
namespace {

// A warp has a token. Losses are sums of one cluster or, where there is memory
// for a part of each, of many blocks; gradients take many blocks, each with a
// contiguous run of tokens.
constexpr int kSumThreads = 1024;
constexpr int kSumBlocks = kLossPartials / 2;
constexpr int kThreads = 256;
constexpr int kMaxBlocks = 512;
// As in kernels/router/scores.h.
constexpr double kTinyScore = 1e-20;

// TokenSet in device code.
struct Tokens {
  const uint8_t* valid;
  int64_t valid_stride;
  const int32_t* starts;
  int64_t starts_stride;
  int64_t sequences, count;

  __device__ bool is_valid(int64_t t) const {
    return valid == nullptr || valid[t * valid_stride] != 0;
  }
  __device__ int64_t begin(int64_t s) const {
    if (starts == nullptr) return s == 0 ? 0 : count;
    return starts[s * starts_stride];
  }
};

Tokens tokens_of(const TokenSet& set, int64_t count) {
  Tokens out{};
  out.sequences = 1;
  out.count = count;
  if (set.valid_T) {
    out.valid = set.valid_T.data;
    out.valid_stride = set.valid_T.strides[0];
  }
  if (set.sequence_S1) {
    out.starts = set.sequence_S1.data;
    out.starts_stride = set.sequence_S1.strides[0];
    out.sequences = set.sequence_S1.size(0) - 1;
  }
  return out;
}

// Valid tokens in [begin, end), counted by a block.
template <int kBlock>
__device__ int64_t count_valid(const Tokens& set, int64_t begin, int64_t end) {
  if (set.valid == nullptr) return end - begin;
  int64_t n = 0;
  for (int64_t t = begin + threadIdx.x; t < end; t += kBlock) {
    n += set.is_valid(t);
  }
  return block_sum<kBlock>(n);
}

// f_e of one sequence; false if nothing was counted. Starts with a barrier.
template <int kBlock, class A>
__device__ bool load_fractions(const Rows<const int32_t, 2>& counts, int64_t s,
                               A* f) {
  const int64_t experts = counts.size[1];
  int64_t sum = 0;
  for (int64_t e = threadIdx.x; e < experts; e += kBlock) sum += counts(s, e);
  const int64_t total = block_sum<kBlock>(sum);
  if (total == 0) return false;
  for (int64_t e = threadIdx.x; e < experts; e += kBlock) {
    f[e] = static_cast<A>(static_cast<double>(experts) * counts(s, e) /
                          static_cast<double>(total));
  }
  __syncthreads();
  return true;
}

__device__ int lane_of_thread() {
  return static_cast<int>(threadIdx.x) % kWarp;
}

// One token's softmax, as a warp finds it.
template <class A>
struct Softmax {
  A max, sum;

  __device__ Softmax(const A* logit, int64_t experts) : max(-INFINITY), sum(0) {
    for (int64_t e = lane_of_thread(); e < experts; e += kWarp) {
      max = logit[e] > max ? logit[e] : max;
    }
    max = warp_max(max);
    for (int64_t e = lane_of_thread(); e < experts; e += kWarp) {
      sum += exp(logit[e] - max);
    }
    sum = warp_sum(sum);
  }
  __device__ A of(A logit) const { return exp(logit - max) / sum; }
  __device__ A log_sum_exp() const { return max + log(sum); }
};

// What balance needs of one token: p_e = q_e / z, and sum_e f_e p_e.
template <class A>
struct Quotient {
  A z = 1, weighted = 0;
};

// f(q, slope of the score, e) is called where e is this lane's.
template <class A, class Each>
__device__ Quotient<A> quotient(BalanceKind kind, const A* logit, const A* bias,
                                const A* f, int64_t experts, Each each) {
  Quotient<A> out;
  if (kind == BalanceKind::kSoftmax) {
    const Softmax<A> p(logit, experts);
    for (int64_t e = lane_of_thread(); e < experts; e += kWarp) {
      out.weighted += f[e] * p.of(logit[e]);
    }
    out.weighted = warp_sum(out.weighted);
    for (int64_t e = lane_of_thread(); e < experts; e += kWarp) {
      const A s = p.of(logit[e]);
      each(out, s, e);
    }
    return out;
  }
  const auto sigmoid = [](A x) { return A(1) / (A(1) + exp(-x)); };
  A z = 0;
  for (int64_t e = lane_of_thread(); e < experts; e += kWarp) {
    const A q = sigmoid(logit[e]) + (bias == nullptr ? A(0) : bias[e]);
    z += q;
    out.weighted += f[e] * q;
  }
  out.z = warp_sum(z) + A(kTinyScore);
  out.weighted = warp_sum(out.weighted) / out.z;
  for (int64_t e = lane_of_thread(); e < experts; e += kWarp) {
    const A s = sigmoid(logit[e]);
    each(out, s * (A(1) - s), e);
  }
  return out;
}

// A block's part of a loss, sum and count: it is one of a cluster, whose first
// block finishes, or leaves its part for aux_loss_mean_kernel().
template <class A>
__device__ void finish_mean(double sum, int64_t count, A* loss,
                            double* partial) {
  if (partial != nullptr) {
    if (threadIdx.x == 0) {
      partial[blockIdx.x] = sum;
      partial[kSumBlocks + blockIdx.x] = static_cast<double>(count);
    }
    return;
  }
  const double total = cluster_sum(sum);
  const int64_t all = cluster_sum(count);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *loss = all == 0 ? A(0) : A(total / static_cast<double>(all));
  }
}
constexpr int kPartThreads = 256;
template <class A>
__global__ void __launch_bounds__(kPartThreads)
    aux_loss_mean_kernel(int parts, const double* partial, A* loss) {
  double sum = 0, count = 0;
  for (int i = threadIdx.x; i < parts; i += kPartThreads) {
    sum += partial[i];
    count += partial[kSumBlocks + i];
  }
  sum = block_sum<kPartThreads>(sum);
  count = block_sum<kPartThreads>(count);
  if (threadIdx.x == 0) *loss = count == 0 ? A(0) : A(sum / count);
}
// `kernel` makes the parts of a loss over so many tokens; its last arguments
// are loss and partial.
template <class A, class... P>
void launch_mean(const Launch& l, void (*kernel)(P..., A*, double*),
                 int64_t tokens, const View<A>& loss,
                 const View<double>& partial,
                 const std::type_identity_t<P>&... args) {
  if (!partial) {
    return launch_clusters(l, kernel, dim3(kCluster), kSumThreads, 0, args...,
                           loss.data, nullptr);
  }
  const auto blocks = static_cast<int>(std::clamp<int64_t>(
      ceil_div(tokens, kSumThreads / kWarp), 1, kSumBlocks));
  kernel<<<static_cast<unsigned>(blocks), kSumThreads, 0, stream_of(l)>>>(
      args..., loss.data, partial.data);
  aux_loss_mean_kernel<<<1, kPartThreads, 0, stream_of(l)>>>(
      blocks, partial.data, loss.data);
}

template <class A>
__global__ void __launch_bounds__(kSumThreads)
    balance_forward(BalanceKind kind, Rows<const A, 2> logits, const A* bias,
                    Rows<const int32_t, 2> counts, Tokens set, A* loss,
                    double* partial) {
  __shared__ A f[kMaxExperts];
  constexpr int kWarps = kSumThreads / kWarp;
  const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  double mine = 0;
  int64_t filled = 0;
  for (int64_t s = 0; s < set.sequences; ++s) {
    const int64_t begin = set.begin(s), end = set.begin(s + 1);
    const int64_t valid = count_valid<kSumThreads>(set, begin, end);
    if (valid == 0) continue;
    ++filled;
    if (!load_fractions<kSumThreads>(counts, s, f)) continue;
    double sum = 0;
    for (int64_t t = begin + warp; t < end; t += int64_t{gridDim.x} * kWarps) {
      if (!set.is_valid(t)) continue;
      const auto nothing = [](const Quotient<A>&, A, int64_t) {};
      sum += static_cast<double>(
          quotient(kind, logits.row(t), bias, f, logits.size[1], nothing)
              .weighted);
    }
    if (lane_of_thread() == 0) mine += sum / static_cast<double>(valid);
    __syncthreads();  // before f is another sequence's
  }
  // Every block has found the same number of sequences.
  finish_mean(block_sum<kSumThreads>(mine), blockIdx.x == 0 ? filled : 0, loss,
              partial);
}

// The block's run of tokens.
struct Run {
  int64_t begin, end;
};
__device__ Run run_of_block(int64_t tokens) {
  const int64_t each = (tokens + gridDim.x - 1) / gridDim.x;
  const int64_t begin = min(blockIdx.x * each, tokens);
  return {begin, min(begin + each, tokens)};
}

template <class A>
__device__ void fill_row(A* row, int64_t n, A value) {
  for (int64_t e = lane_of_thread(); e < n; e += kWarp) row[e] = value;
}

template <class A>
__global__ void __launch_bounds__(kThreads)
    balance_backward(double dloss, BalanceKind kind, Rows<const A, 2> logits,
                     const A* bias, Rows<const int32_t, 2> counts, Tokens set,
                     Rows<A, 2> dlogits) {
  __shared__ A f[kMaxExperts];
  const Run run = run_of_block(set.count);
  const int64_t experts = logits.size[1];
  int64_t filled = 0;
  for (int64_t s = 0; s < set.sequences; ++s) {
    filled += count_valid<kThreads>(set, set.begin(s), set.begin(s + 1)) > 0;
  }
  for (int64_t s = 0; s < set.sequences; ++s) {
    const int64_t begin = set.begin(s), end = set.begin(s + 1);
    if (begin >= run.end || end <= run.begin) continue;
    const int64_t valid = count_valid<kThreads>(set, begin, end);
    const bool counted = load_fractions<kThreads>(counts, s, f);
    const A g = A(dloss / (static_cast<double>(max(valid, int64_t{1})) *
                           static_cast<double>(max(filled, int64_t{1}))));
    for (int64_t t = max(begin, run.begin) + threadIdx.x / kWarp;
         t < min(end, run.end); t += kThreads / kWarp) {
      A* out = dlogits.row(t);
      if (!counted || !set.is_valid(t)) {
        fill_row(out, experts, A(0));
        continue;
      }
      // d p_e' / d q_e = ([e' = e] - p_e') / z, and q_e = s_e + const; softmax
      // has z = 1 and slope s instead of s (1 - s).
      quotient(kind, logits.row(t), bias, f, experts,
               [&](const Quotient<A>& p, A slope, int64_t e) {
                 out[e] = slope * (g / p.z) * (f[e] - p.weighted);
               });
    }
    __syncthreads();  // before f is another sequence's
  }
}

template <class A>
__global__ void __launch_bounds__(kSumThreads)
    z_forward(Rows<const A, 2> logits, Tokens set, A* loss, double* partial) {
  constexpr int kWarps = kSumThreads / kWarp;
  double mine = 0;
  int64_t count = 0;
  for (int64_t t = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
       t < set.count; t += int64_t{gridDim.x} * kWarps) {
    if (!set.is_valid(t)) continue;
    const A z = Softmax<A>(logits.row(t), logits.size[1]).log_sum_exp();
    if (lane_of_thread() == 0) {
      mine += static_cast<double>(z * z);
      ++count;
    }
  }
  const double sum = block_sum<kSumThreads>(mine);
  finish_mean(sum, block_sum<kSumThreads>(count), loss, partial);
}

template <class A>
__global__ void __launch_bounds__(kThreads)
    z_backward(double dloss, Rows<const A, 2> logits, Tokens set,
               Rows<A, 2> dlogits) {
  const Run run = run_of_block(set.count);
  const int64_t experts = logits.size[1];
  const int64_t valid = count_valid<kThreads>(set, 0, set.count);
  const A g = A(2 * dloss / static_cast<double>(max(valid, int64_t{1})));
  for (int64_t t = run.begin + threadIdx.x / kWarp; t < run.end;
       t += kThreads / kWarp) {
    A* out = dlogits.row(t);
    if (!set.is_valid(t)) {
      fill_row(out, experts, A(0));
      continue;
    }
    const A* logit = logits.row(t);
    const Softmax<A> p(logit, experts);
    const A scale = g * p.log_sum_exp();
    for (int64_t e = lane_of_thread(); e < experts; e += kWarp) {
      out[e] = p.of(logit[e]) * scale;
    }
  }
}

// One cluster a sequence: its blocks share the pairs, then the experts.
template <class C>
__global__ void __launch_bounds__(kSumThreads)
    count_experts_kernel(Rows<const int32_t, 2> ids, Tokens set,
                         Rows<C, 2> counts) {
  namespace cg = cooperative_groups;
  __shared__ int32_t histogram[kMaxExperts];
  const cg::cluster_group cluster = cg::this_cluster();
  const int64_t s = blockIdx.x / kCluster;
  const int64_t experts = counts.size[1], top_k = ids.size[1];
  for (int64_t e = threadIdx.x; e < experts; e += kSumThreads) histogram[e] = 0;
  __syncthreads();
  const int64_t begin = set.begin(s),
                pairs = (set.begin(s + 1) - begin) * top_k;
  const int64_t mine =
      int64_t{cluster.block_rank()} * kSumThreads + threadIdx.x;
#pragma unroll 4
  for (int64_t i = mine; i < pairs; i += int64_t{kCluster} * kSumThreads) {
    const Division at = divide(i, top_k);
    const int64_t t = begin + at.quotient;
    const int32_t e = set.is_valid(t) ? ids(t, at.rest) : -1;
    if (e >= 0) atomicAdd(&histogram[e], 1);  // of integers: any order
  }
  cluster.sync();
  for (int64_t e = mine; e < experts; e += int64_t{kCluster} * kSumThreads) {
    int32_t sum = 0;
#pragma unroll
    for (unsigned b = 0; b < kCluster; ++b) {
      sum += *cluster.map_shared_rank(&histogram[e], b);
    }
    counts(s, e) = sum;
  }
  cluster.sync();  // nobody leaves before its counts are read
}

__global__ void __launch_bounds__(kSumThreads)
    move_bias_kernel(Rows<const int64_t, 2> counts, float rate,
                     Rows<float, 1> bias, const double* clip) {
  if (clip != nullptr && !isfinite(*clip)) return;
  const int64_t experts = counts.size[1];
  const auto count = [&](int64_t e) {
    int64_t sum = 0;
    for (int64_t m = 0; m < counts.size[0]; ++m) sum += counts(m, e);
    return sum;
  };
  int64_t sum = 0;
  for (int64_t e = threadIdx.x; e < experts; e += kSumThreads) sum += count(e);
  const int64_t total = block_sum<kSumThreads>(sum);
  for (int64_t e = threadIdx.x; e < experts; e += kSumThreads) {
    // The sign of mean - c, in integers.
    const int64_t short_of = total - experts * count(e);
    const int sign = (short_of > 0) - (short_of < 0);
    bias(e) += rate * static_cast<float>(sign);
  }
}

unsigned blocks_for(int64_t tokens) {
  return static_cast<unsigned>(
      std::min<int64_t>(ceil_div(tokens, kThreads / kWarp), kMaxBlocks));
}

}  // namespace

template <class C>
void count_experts(Launch l, View<const int32_t> ids, const TokenSet& set,
                   View<C> counts) {
  CHECK_LE(counts.size(1), kMaxExperts) << "[aux_loss] " << describe(counts);
  const Tokens tokens = tokens_of(set, ids.size(0));
  if (tokens.sequences == 0) return;
  launch_clusters(l, count_experts_kernel<C>,
                  dim3(kCluster * static_cast<unsigned>(tokens.sequences)),
                  kSumThreads, 0, rows<2>(ids), tokens, rows<2>(counts));
  check_launch("count_experts");
}

template <class A>
void balance_loss_forward(Launch l, BalanceKind kind, View<const A> logits,
                          const A* bias, View<const int32_t> counts,
                          const TokenSet& set, View<A> loss,
                          View<double> partial) {
  launch_mean<A, BalanceKind, Rows<const A, 2>, const A*,
              Rows<const int32_t, 2>, Tokens>(
      l, balance_forward<A>, logits.size(0), loss, partial, kind,
      rows<2>(logits), bias, rows<2>(counts), tokens_of(set, logits.size(0)));
  check_launch("balance_loss_forward");
}

template <class A>
void balance_loss_backward(Launch l, double dloss, BalanceKind kind,
                           View<const A> logits, const A* bias,
                           View<const int32_t> counts, const TokenSet& set,
                           View<A> dlogits) {
  const unsigned blocks = blocks_for(logits.size(0));
  if (blocks == 0) return;
  balance_backward<A><<<blocks, kThreads, 0, stream_of(l)>>>(
      dloss, kind, rows<2>(logits), bias, rows<2>(counts),
      tokens_of(set, logits.size(0)), rows<2>(dlogits));
  check_launch("balance_loss_backward");
}

template <class A>
void z_loss_forward(Launch l, View<const A> logits, const TokenSet& set,
                    View<A> loss, View<double> partial) {
  launch_mean<A, Rows<const A, 2>, Tokens>(l, z_forward<A>, logits.size(0),
                                           loss, partial, rows<2>(logits),
                                           tokens_of(set, logits.size(0)));
  check_launch("z_loss_forward");
}

template <class A>
void z_loss_backward(Launch l, double dloss, View<const A> logits,
                     const TokenSet& set, View<A> dlogits) {
  const unsigned blocks = blocks_for(logits.size(0));
  if (blocks == 0) return;
  z_backward<A><<<blocks, kThreads, 0, stream_of(l)>>>(
      dloss, rows<2>(logits), tokens_of(set, logits.size(0)), rows<2>(dlogits));
  check_launch("z_loss_backward");
}

void update_router_bias(Launch l, View<const int64_t> counts, double rate,
                        View<float> bias, View<const double> clip) {
  if (counts.size(1) == 0) return;
  move_bias_kernel<<<1, kSumThreads, 0, stream_of(l)>>>(
      rows<2>(counts), static_cast<float>(rate), rows<1>(bias), clip.data);
  check_launch("update_router_bias");
}

#define INSTANTIATE(A)                                                        \
  template void balance_loss_forward(Launch, BalanceKind, View<const A>,      \
                                     const A*, View<const int32_t>,           \
                                     const TokenSet&, View<A>, View<double>); \
  template void balance_loss_backward(                                        \
      Launch, double, BalanceKind, View<const A>, const A*,                   \
      View<const int32_t>, const TokenSet&, View<A>);                         \
  template void z_loss_forward(Launch, View<const A>, const TokenSet&,        \
                               View<A>, View<double>);                        \
  template void z_loss_backward(Launch, double, View<const A>,                \
                                const TokenSet&, View<A>)
INSTANTIATE(float);
INSTANTIATE(double);
#undef INSTANTIATE
template void count_experts(Launch, View<const int32_t>, const TokenSet&,
                            View<int32_t>);
template void count_experts(Launch, View<const int32_t>, const TokenSet&,
                            View<int64_t>);

}  // namespace tapeline::cuda
