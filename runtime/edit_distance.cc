#include "runtime/edit_distance.h"

#include <algorithm>

namespace tapeline {
namespace {

std::string_view last_part(std::string_view name) {
  return name.substr(name.rfind('.') + 1);
}

}  // namespace

int edit_distance(std::string_view a, std::string_view b) {
  const size_t n = b.size();
  // Rows i - 2, i - 1 and i of the table.
  std::vector<int> two(n + 1), one(n + 1), now(n + 1);
  for (size_t j = 0; j <= n; ++j) one[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    now[0] = static_cast<int>(i);
    for (size_t j = 1; j <= n; ++j) {
      const int replaced = one[j - 1] + (a[i - 1] != b[j - 1]);
      now[j] = std::min({one[j] + 1, now[j - 1] + 1, replaced});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        now[j] = std::min(now[j], two[j - 2] + 1);
      }
    }
    std::swap(two, one);
    std::swap(one, now);
  }
  return one[n];
}

std::string did_you_mean(std::string_view word,
                         const std::vector<std::string>& candidates) {
  // Longer names cannot be meant by a typing slip and would cost time.
  constexpr size_t kLongest = 200;
  if (word.empty() || word.size() > kLongest) return "";
  int best = std::max<int>(1, static_cast<int>(word.size()) / 3) + 1;
  std::string nearest;
  for (const std::string& candidate : candidates) {
    if (candidate.size() > kLongest) continue;
    const int distance = edit_distance(word, candidate);
    if (distance < best) {
      best = distance;
      nearest = candidate;
    }
  }
  if (!nearest.empty()) return nearest;
  for (const std::string& candidate : candidates) {
    if (last_part(candidate) == last_part(word)) return candidate;
  }
  return "";
}

std::string suggestion(std::string_view word,
                       const std::vector<std::string>& candidates) {
  const std::string nearest = did_you_mean(word, candidates);
  return nearest.empty() ? "" : "; did you mean '" + nearest + "'?";
}

}  // namespace tapeline
