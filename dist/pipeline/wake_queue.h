// Ranks that may be able to go on; each is tried again only when it was woken.
#pragma once

#include <deque>
#include <optional>
#include <vector>

namespace tapeline::internal {

class WakeQueue {
 public:
  explicit WakeQueue(int ranks) : waiting_(ranks, false) {
    for (int r = 0; r < ranks; ++r) wake(r);
  }
  void wake(int rank) {
    if (waiting_[rank]) return;
    waiting_[rank] = true;
    queue_.push_back(rank);
  }
  std::optional<int> next() {
    if (queue_.empty()) return std::nullopt;
    const int rank = queue_.front();
    queue_.pop_front();
    waiting_[rank] = false;
    return rank;
  }

 private:
  std::vector<bool> waiting_;
  std::deque<int> queue_;
};

}  // namespace tapeline::internal
