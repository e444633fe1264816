// Routings that every op on routed rows is tested with, and their tables by
// brute force.
#pragma once

#include <cstdint>
#include <ostream>
#include <random>
#include <vector>

namespace tapeline {

enum class Load {
  kRandom,
  kOneExpert,  // everything to the middle one
  kNoFirst,    // first expert without a token
  kNoMiddle,
  kNoLast,
  kSomeUnrouted,  // a third of the ids is -1
  kAllUnrouted,
  kSameTwice,  // a token names one expert in all its slots
};

struct RouteCase {
  const char* name;
  int64_t tokens, top_k, experts;
  int64_t spare;  // rows of capacity beyond tokens * top_k
  Load load;
};

inline std::ostream& operator<<(std::ostream& out, const RouteCase& c) {
  return out << c.name;
}

inline const std::vector<RouteCase>& route_cases() {
  static const std::vector<RouteCase> cases = {
      {"even", 64, 2, 8, 0, Load::kRandom},
      {"odd_sizes", 37, 3, 5, 7, Load::kRandom},
      {"one_token", 1, 2, 4, 0, Load::kRandom},
      {"no_token", 0, 2, 4, 3, Load::kRandom},
      {"one_slot", 19, 1, 6, 1, Load::kRandom},
      {"one_of_one", 9, 1, 1, 0, Load::kRandom},
      {"all_to_one", 33, 2, 7, 5, Load::kOneExpert},
      {"none_to_first", 41, 2, 5, 0, Load::kNoFirst},
      {"none_to_middle", 41, 2, 5, 0, Load::kNoMiddle},
      {"none_to_last", 41, 2, 5, 9, Load::kNoLast},
      {"some_unrouted", 50, 4, 6, 11, Load::kSomeUnrouted},
      {"all_unrouted", 10, 2, 4, 6, Load::kAllUnrouted},
      {"same_expert_twice", 12, 3, 4, 2, Load::kSameTwice},
      {"many_experts", 200, 8, 256, 13, Load::kRandom},
      {"several_groups", 1500, 6, 61, 100, Load::kSomeUnrouted},
      {"groups_of_one", 3000, 2, 300, 0, Load::kSameTwice},
  };
  return cases;
}

inline std::vector<int32_t> ids_of(const RouteCase& c) {
  std::mt19937 random(static_cast<uint32_t>(c.tokens * 31 + c.experts));
  const auto draw = [&](int64_t n) {
    return static_cast<int32_t>(random() % n);
  };
  const int32_t experts = static_cast<int32_t>(c.experts);
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t k = 0; k < c.top_k; ++k) {
      int32_t e = draw(c.experts);
      switch (c.load) {
        case Load::kRandom:
          break;
        case Load::kOneExpert:
          e = experts / 2;
          break;
        case Load::kNoFirst:
          e = 1 + draw(experts - 1);
          break;
        case Load::kNoMiddle:
          e += e == experts / 2;
          break;
        case Load::kNoLast:
          e = draw(experts - 1);
          break;
        case Load::kSomeUnrouted:
          e = draw(3) == 0 ? -1 : e;
          break;
        case Load::kAllUnrouted:
          e = -1;
          break;
        case Load::kSameTwice:
          e = k == 0 ? e : ids.back();
          break;
      }
      ids.push_back(e);
    }
  }
  return ids;
}

struct RouteTables {
  int64_t capacity;
  std::vector<int32_t> ids, offsets, row, token, slot;
  int64_t routed() const { return offsets.back(); }
};

// By asking for every expert which pairs name it.
inline RouteTables tables_of(const RouteCase& c) {
  RouteTables out;
  out.capacity = c.tokens * c.top_k + c.spare;
  out.ids = ids_of(c);
  out.row.assign(out.ids.size(), -1);
  for (int64_t e = 0; e < c.experts; ++e) {
    out.offsets.push_back(static_cast<int32_t>(out.token.size()));
    for (size_t i = 0; i < out.ids.size(); ++i) {
      if (out.ids[i] != e) continue;
      out.row[i] = static_cast<int32_t>(out.token.size());
      out.token.push_back(static_cast<int32_t>(i / c.top_k));
      out.slot.push_back(static_cast<int32_t>(i % c.top_k));
    }
  }
  out.offsets.push_back(static_cast<int32_t>(out.token.size()));
  out.token.resize(out.capacity, -1);
  out.slot.resize(out.capacity, -1);
  return out;
}

}  // namespace tapeline
