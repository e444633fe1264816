// Routers that the choice, the weights and their gradient are tested with.
#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include "kernels/router/router.h"

namespace tapeline {

struct RouterCase {
  const char* name;
  int64_t tokens, experts;
  bool biased;
  double bias_mean;
  RouterOptions options;
};

inline std::ostream& operator<<(std::ostream& out, const RouterCase& c) {
  return out << c.name;
}

inline const std::vector<RouterCase>& router_cases() {
  constexpr auto kSigmoid = RouterOptions::kSigmoid;
  constexpr auto kSoftmax = RouterOptions::kSoftmax;
  static const std::vector<RouterCase> cases = {
      {"glm", 33, 256, true, 0, {.score = kSigmoid, .top_k = 8, .scale = 2.5}},
      {"deepseek_v3",
       33,
       256,
       true,
       0,
       {.score = kSigmoid,
        .top_k = 8,
        .groups = 8,
        .top_groups = 4,
        .scale = 2.5}},
      // Every choice value is negative: a dropped group must not win as 0.
      {"negative_choices",
       40,
       16,
       true,
       -2,
       {.score = kSigmoid,
        .top_k = 3,
        .groups = 4,
        .top_groups = 2,
        .scale = 2.5}},
      {"qwen3_moe", 21, 128, false, 0, {.score = kSoftmax, .top_k = 8}},
      {"softmax_not_normalized",
       21,
       33,
       false,
       0,
       {.score = kSoftmax, .top_k = 5, .normalize = false}},
      {"softmax_biased",
       21,
       24,
       true,
       0,
       {.score = kSoftmax, .top_k = 2, .groups = 3, .top_groups = 2}},
      {"sigmoid_not_normalized",
       21,
       7,
       false,
       0,
       {.score = kSigmoid, .top_k = 3, .normalize = false, .scale = 0.5}},
      {"one_token", 1, 5, true, 0, {.score = kSigmoid, .top_k = 2}},
      {"no_token", 0, 5, true, 0, {.score = kSigmoid, .top_k = 2}},
      {"one_expert", 4, 1, true, 0, {.score = kSigmoid, .top_k = 1}},
      {"all_experts", 9, 6, true, 0, {.score = kSigmoid, .top_k = 6}},
      {"groups_of_one",
       9,
       6,
       true,
       0,
       {.score = kSigmoid, .top_k = 2, .groups = 6, .top_groups = 3}},
      {"most_experts",
       3,
       kMaxExperts,
       true,
       0,
       {.score = kSigmoid, .top_k = 16, .groups = 128, .top_groups = 5}},
  };
  return cases;
}

}  // namespace tapeline
