// Schedules whose stages lie on the ranks round and round.
#include <algorithm>
#include <deque>
#include <optional>

#include "dist/pipeline/generators_internal.h"
#include "dist/pipeline/wake_queue.h"
#include "runtime/check.h"

namespace tapeline::internal {
namespace {

using Passes = std::vector<Pass>;

// Micro-batches pass the stages of a rank group by group: each stage takes the
// whole group before the next does, forward from the first stage, backward from
// the last. The last group may be smaller.
Passes in_groups(PassKind kind, int rank, int ranks, int chunks,
                 int micro_batches, int group) {
  Passes out;
  for (int begin = 0; begin < micro_batches; begin += group) {
    const int end = std::min(micro_batches, begin + group);
    for (int c = 0; c < chunks; ++c) {
      const int chunk = kind == PassKind::kForward ? c : chunks - 1 - c;
      for (int j = begin; j < end; ++j) {
        out.push_back(pass(kind, chunk * ranks + rank, j));
      }
    }
  }
  return out;
}

Passes alternate(const Passes& forward, const Passes& backward,
                 int64_t warm_up) {
  const size_t n = forward.size();
  const size_t ahead = std::min<size_t>(n, warm_up);
  Passes out(forward.begin(), forward.begin() + ahead);
  for (size_t k = 0; k < n; ++k) {
    if (ahead + k < n) out.push_back(forward[ahead + k]);
    out.push_back(backward[k]);
  }
  return out;
}

// Groups smaller than the number of ranks, and a last group that is, can leave
// ranks waiting for one another's next forward pass. Where all wait, a rank
// takes its next forward pass before the backward pass that it waits for.
class Unblock {
 public:
  Unblock(std::vector<Passes>& ranks, int stages, int micro_batches)
      : ranks_(ranks),
        stages_(stages),
        micro_batches_(micro_batches),
        forward_(size_t(stages) * micro_batches),
        backward_(forward_.size()),
        at_(ranks.size(), 0),
        woken_(static_cast<int>(ranks.size())) {}

  void run() {
    do {
      while (const std::optional<int> rank = woken_.next()) advance(*rank);
    } while (pull_forward());
    for (size_t r = 0; r < ranks_.size(); ++r) {
      CHECK_EQ(at_[r], ranks_[r].size()) << "[schedule] no pass can run";
    }
  }

 private:
  std::vector<bool>::reference of(std::vector<bool>& flags, int stage, int j) {
    return flags[size_t(stage) * micro_batches_ + j];
  }
  bool ready(const Pass& p) {
    if (p.is_forward()) {
      return p.stage == 0 || of(forward_, p.stage - 1, p.micro_batch);
    }
    return of(forward_, p.stage, p.micro_batch) &&
           (p.stage == stages_ - 1 ||
            of(backward_, p.stage + 1, p.micro_batch));
  }
  void advance(int r) {
    for (; at_[r] < ranks_[r].size() && ready(ranks_[r][at_[r]]); ++at_[r]) {
      const Pass& p = ranks_[r][at_[r]];
      of(p.is_forward() ? forward_ : backward_, p.stage, p.micro_batch) = true;
      const int next = p.stage + (p.is_forward() ? 1 : -1);
      if (next >= 0 && next < stages_) {
        woken_.wake(next % static_cast<int>(ranks_.size()));
      }
    }
  }
  bool pull_forward() {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const auto blocked = ranks_[r].begin() + at_[r];
      const auto next =
          std::find_if(blocked, ranks_[r].end(),
                       [](const Pass& p) { return p.is_forward(); });
      if (next == ranks_[r].end() || !ready(*next)) continue;
      std::rotate(blocked, next, next + 1);
      woken_.wake(static_cast<int>(r));
      return true;
    }
    return false;
  }

  std::vector<Passes>& ranks_;
  const int stages_, micro_batches_;
  std::vector<bool> forward_, backward_;
  std::vector<size_t> at_;
  WakeQueue woken_;
};

// B becomes I, and W follows `delay` I's later.
std::vector<Action> split(const Passes& passes, size_t delay) {
  std::vector<Action> out;
  std::deque<Pass> waiting;
  const auto weight = [&] {
    out.emplace_back(waiting.front());
    waiting.pop_front();
  };
  for (const Pass& p : passes) {
    if (p.is_forward()) {
      out.emplace_back(p);
      continue;
    }
    out.emplace_back(pass(PassKind::kInput, p.stage, p.micro_batch));
    waiting.push_back(pass(PassKind::kWeight, p.stage, p.micro_batch));
    if (waiting.size() > delay) weight();
  }
  while (!waiting.empty()) weight();
  return out;
}

}  // namespace

Schedule loop_schedule(const LoopRule& rule, int ranks, int chunks,
                       int micro_batches, int group) {
  Schedule s;
  s.micro_batches = micro_batches;
  s.placement = loop_placement(ranks, chunks);
  group = std::min(group, micro_batches);
  std::vector<Passes> orders;
  for (int r = 0; r < ranks; ++r) {
    // The last rank begins once its last stage has had its first micro-batch;
    // each rank further up is some passes ahead of its successor.
    const int64_t warm_up =
        int64_t{chunks - 1} * group + rule.warm_up_per_hop * (ranks - 1 - r);
    orders.push_back(alternate(
        in_groups(PassKind::kForward, r, ranks, chunks, micro_batches, group),
        in_groups(PassKind::kBackward, r, ranks, chunks, micro_batches, group),
        rule.all_forwards_first ? int64_t{chunks} * micro_batches : warm_up));
  }
  Unblock(orders, s.stages(), micro_batches).run();
  for (int r = 0; r < ranks; ++r) {
    s.ranks.push_back(
        rule.split ? split(orders[r], size_t(rule.delay_per_rank) * r)
                   : std::vector<Action>(orders[r].begin(), orders[r].end()));
  }
  return s;
}

}  // namespace tapeline::internal
