// The scores that one token gives to the experts, sigmoid or softmax of its
// logits: router and aux_loss share this reading of them.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/router/router.h"
#include "kernels/simd_math.h"

namespace tapeline::internal {

template <class A>
class Scores {
 public:
  // Keeps the pointer.
  Scores(const A* logit, int experts, RouterOptions::Score score)
      : logit_(logit),
        experts_(experts),
        softmax_(score == RouterOptions::kSoftmax) {
    if (!softmax_) return;
    max_ = max_of(logit, experts);
    sum_ = lane_sum<A>(experts, [logit, max = max_](int64_t e) {
      return exp_simd(logit[e] - max);
    });
  }

  // Of one expert; the same bits as fill().
  A operator()(int64_t e) const {
    return softmax_ ? exp_simd(logit_[e] - max_) / sum_ : sigmoid(logit_[e]);
  }
  // Of all experts.
  void fill(A* s) const {
    if (softmax_) {
#pragma omp simd
      for (int e = 0; e < experts_; ++e)
        s[e] = exp_simd(logit_[e] - max_) / sum_;
    } else {
#pragma omp simd
      for (int e = 0; e < experts_; ++e) s[e] = sigmoid(logit_[e]);
    }
  }
  // ln sum_e exp(logit); softmax only.
  A log_sum_exp() const { return max_ + std::log(sum_); }

 private:
  const A* logit_;
  int experts_;
  bool softmax_;
  A max_ = 0, sum_ = 1;
};

// 1e-20 keeps 0 / 0 out of a quotient of scores when every score is 0.
inline constexpr double kTinyScore = 1e-20;

}  // namespace tapeline::internal
