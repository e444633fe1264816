#include "dist/pipeline/testing/interpreter.h"

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace tapeline {
namespace {

// A model whose every step can be told from every other: stages hash. Each also
// reads its micro-batch's own data (positions, labels), as real ones do.
uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9E3779B97F4A7C15 ^ (b + 0x7F4A7C15) * 0xD1B54A32D192ED03;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9;
  return x ^ (x >> 32);
}
uint64_t batch(int j) { return mix(17, j); }
uint64_t forward_of(int stage, int j, uint64_t x) {
  return mix(mix(x, 1000 + stage), j);
}
uint64_t loss_gradient(uint64_t y) { return mix(y, 3); }
uint64_t input_gradient(int stage, uint64_t x, uint64_t dy) {
  return mix(mix(x, dy), 2000 + stage);
}
uint64_t weight_gradient(uint64_t x, uint64_t dy) { return mix(x, ~dy); }

// The sums of weight gradients of a plain loop.
std::vector<uint64_t> reference(int stages, int micro_batches) {
  std::vector<uint64_t> sums(stages, 0);
  for (int j = 0; j < micro_batches; ++j) {
    std::vector<uint64_t> x = {batch(j)};
    for (int s = 0; s < stages; ++s) x.push_back(forward_of(s, j, x[s]));
    uint64_t dy = loss_gradient(x[stages]);
    for (int s = stages - 1; s >= 0; --s) {
      sums[s] += weight_gradient(x[s], dy);
      dy = input_gradient(s, x[s], dy);
    }
  }
  return sums;
}

using StageBatch = std::pair<int, int>;

class Machine {
 public:
  Machine(const Schedule& s, const RunOptions& options)
      : s_(s),
        options_(options),
        random_(options.seed),
        at_(s.ranks.size(), 0),
        half_(s.ranks.size(), 0),
        inbox_(s.ranks.size()),
        outbox_(s.ranks.size()),
        most_(s.ranks.size(), 0),
        sums_(s.stages(), 0),
        entered_(s.ranks.size()) {}

  RunResult run() {
    std::vector<int> order(s_.ranks.size());
    std::iota(order.begin(), order.end(), 0);
    for (bool any = true; any && wrong_.empty();) {
      any = false;
      for (size_t i = order.size(); i > 1; --i) {
        random_ = mix(random_, i);
        std::swap(order[i - 1], order[random_ % i]);
      }
      for (const int rank : order) any |= step(rank);
      any |= reduce();
    }
    RunResult out = result();
    out.most = most_;
    return out;
  }

 private:
  struct Kept {
    uint64_t x, y;
  };
  struct Message {
    std::pair<int, bool> queue;
    int to;
    uint64_t value;
  };

  RunResult result() {
    if (!wrong_.empty()) return {Outcome::kWrong, wrong_};
    for (size_t r = 0; r < s_.ranks.size(); ++r) {
      if (!outbox_[r].empty()) {
        return {Outcome::kHung, absl::StrCat("rank ", r, " waits to send")};
      }
      if (at_[r] < s_.ranks[r].size()) {
        return {Outcome::kHung, absl::StrCat("rank ", r, " waits in ",
                                             to_string(s_.ranks[r][at_[r]]))};
      }
      if (!entered_[r].empty()) {
        return {Outcome::kHung, absl::StrCat("rank ", r, " waits in group ",
                                             s_.groups[entered_[r][0]].name)};
      }
    }
    if (sums_ != reference(s_.stages(), s_.micro_batches)) {
      return {Outcome::kWrong, "gradients differ"};
    }
    size_t left = kept_.size() + stash_.size() + local_.size();
    for (const auto& [key, queue] : queues_) left += queue.size();
    if (left > 0) return {Outcome::kWrong, "values are left over"};
    return {};
  }

  bool trap(const std::string& what) {
    if (wrong_.empty()) wrong_ = what;
    return true;
  }

  // --- Values on their way. A queue is a stage that sends and a direction.
  using Queue = std::pair<int, bool>;

  bool crosses(int from, int to) const {
    return s_.placement[from] != s_.placement[to];
  }
  void put(int from, int to, bool f, int j, uint64_t value) {
    if (crosses(from, to)) {
      outbox_[s_.placement[from]].push_back({{from, f}, to, value});
    } else {
      local_[{from, f, j}] = value;
    }
  }
  bool there(int from, int to, bool f, int j) {
    return crosses(from, to) ? inbox_[s_.placement[to]].count({from, f}) > 0
                             : local_.count({from, f, j}) > 0;
  }
  uint64_t get(int from, int to, bool f, int j) {
    return crosses(from, to)
               ? inbox_[s_.placement[to]].extract({from, f}).mapped()
               : local_.extract({from, f, j}).mapped();
  }
  // The queue from which the rank receives next, if it does not send or run.
  std::optional<Queue> receives(int rank) {
    if (!outbox_[rank].empty() || at_[rank] == s_.ranks[rank].size()) {
      return std::nullopt;
    }
    if (!broken(rank).empty()) return std::nullopt;
    for (const Pass& p : current(rank)) {
      if (p.kind == PassKind::kWeight) continue;
      const bool f = p.kind == PassKind::kForward;
      const int from = f ? p.stage - 1 : p.stage + 1;
      if (from < 0 || from >= s_.stages() || !crosses(from, p.stage)) continue;
      if (inbox_[rank].count({from, f}) == 0) return Queue{from, f};
    }
    return std::nullopt;
  }
  bool send(int rank) {
    const Message& m = outbox_[rank].front();
    const int to = s_.placement[m.to];
    std::deque<uint64_t>& queue = queues_[m.queue];
    if (options_.capacity == 0u) {
      if (receives(to) != m.queue) return false;
      inbox_[to][m.queue] = m.value;
    } else {
      if (options_.capacity && queue.size() >= *options_.capacity) return false;
      queue.push_back(m.value);
    }
    outbox_[rank].pop_front();
    return true;
  }
  bool receive(int rank, const Queue& from) {
    std::deque<uint64_t>& queue = queues_[from];
    if (queue.empty()) return false;
    inbox_[rank][from] = queue.front();
    queue.pop_front();
    return true;
  }

  // --- Passes
  bool can_run(const Pass& p) {
    const StageBatch key{p.stage, p.micro_batch};
    switch (p.kind) {
      case PassKind::kForward:
        return p.stage == 0 || there(p.stage - 1, p.stage, true, p.micro_batch);
      case PassKind::kWeight:
        return stash_.count(key) > 0;
      default:
        return kept_.count(key) > 0 &&
               (p.stage == s_.stages() - 1 ||
                there(p.stage + 1, p.stage, false, p.micro_batch));
    }
  }
  void run_forward(const Pass& p) {
    const StageBatch key{p.stage, p.micro_batch};
    if (!begun_.emplace(key, true).second) trap("a forward pass again");
    const uint64_t x = p.stage == 0
                           ? batch(p.micro_batch)
                           : get(p.stage - 1, p.stage, true, p.micro_batch);
    const uint64_t y = forward_of(p.stage, p.micro_batch, x);
    kept_[key] = {x, y};
    if (p.stage + 1 < s_.stages()) {
      put(p.stage, p.stage + 1, true, p.micro_batch, y);
    }
  }
  void run_input(const Pass& p) {
    const StageBatch key{p.stage, p.micro_batch};
    const Kept kept = kept_.extract(key).mapped();
    const uint64_t dy = p.stage == s_.stages() - 1
                            ? loss_gradient(kept.y)
                            : get(p.stage + 1, p.stage, false, p.micro_batch);
    stash_[key] = {kept.x, dy};
    if (p.stage > 0) {
      put(p.stage, p.stage - 1, false, p.micro_batch,
          input_gradient(p.stage, kept.x, dy));
    }
  }
  void run_weight(const Pass& p) {
    const Kept kept = stash_.extract({p.stage, p.micro_batch}).mapped();
    sums_[p.stage] += weight_gradient(kept.x, kept.y);
  }
  void weigh(int rank) {
    double now = 0;
    for (const auto& [key, kept] : kept_) {
      if (s_.placement[key.first] == rank) now += options_.forward_weight;
    }
    for (const auto& [key, kept] : stash_) {
      if (s_.placement[key.first] == rank) now += options_.stash_weight;
    }
    most_[rank] = std::max(most_[rank], now);
  }
  void run(const Pass& p, int rank) {
    run_kind(p, rank);
    weigh(rank);
  }
  void run_kind(const Pass& p, int rank) {
    if (p.kind == PassKind::kForward) return run_forward(p);
    if (p.kind != PassKind::kWeight) run_input(p);
    if (p.kind != PassKind::kInput) {
      run_weight(p);
      enter_groups(rank, p.stage);
    }
  }

  // The action under way, or the half of it that is.
  std::span<const Pass> current(int rank) const {
    const std::span<const Pass> all = s_.ranks[rank][at_[rank]].passes();
    return options_.ov_release == OvRelease::kEarly
               ? all.subspan(half_[rank], 1)
               : all;
  }
  // What is wrong with the rank's action for any machine.
  std::string broken(int rank) const {
    const std::span<const Pass> passes = s_.ranks[rank][at_[rank]].passes();
    if (passes.size() == 2 && (passes[0].kind != PassKind::kForward ||
                               passes[1].kind != PassKind::kBackward)) {
      return "a pair of other passes";
    }
    for (const Pass& p : passes) {
      if (p.stage < 0 || p.stage >= s_.stages() || p.micro_batch < 0 ||
          p.micro_batch >= s_.micro_batches) {
        return "there is no such stage or micro-batch";
      }
      if (s_.placement[p.stage] != rank) return "no weights here";
    }
    return "";
  }
  bool step(int rank) {
    if (!outbox_[rank].empty()) return send(rank);
    if (at_[rank] == s_.ranks[rank].size()) return false;
    if (const std::string what = broken(rank); !what.empty()) {
      return trap(what);
    }
    if (const auto queue = receives(rank)) return receive(rank, *queue);
    const std::span<const Pass> passes = current(rank);
    if (!std::all_of(passes.begin(), passes.end(),
                     [&](const Pass& p) { return can_run(p); })) {
      return false;
    }
    for (const Pass& p : passes) run(p, rank);
    half_[rank] += passes.size();
    if (half_[rank] < s_.ranks[rank][at_[rank]].passes().size()) return true;
    half_[rank] = 0;
    ++at_[rank];
    return true;
  }

  // --- Reductions of groups: a queue per rank; a group is reduced when it is
  // the first in the queues of all its ranks.
  bool more_to_come(int rank, const ReplicaGroup& group) const {
    // The action under way is the last one that counts.
    for (size_t i = at_[rank]; i < s_.ranks[rank].size(); ++i) {
      for (const Pass& p : s_.ranks[rank][i].passes()) {
        const bool weight =
            p.kind == PassKind::kWeight || p.kind == PassKind::kBackward;
        const bool member =
            std::count(group.stages.begin(), group.stages.end(), p.stage) > 0;
        if (weight && member && i > at_[rank]) return true;
      }
    }
    return false;
  }
  void enter_groups(int rank, int stage) {
    for (size_t g = 0; g < s_.groups.size(); ++g) {
      const ReplicaGroup& group = s_.groups[g];
      if (std::count(group.stages.begin(), group.stages.end(), stage) > 0 &&
          !more_to_come(rank, group)) {
        entered_[rank].push_back(static_cast<int>(g));
      }
    }
  }
  bool reduce() {
    bool any = false;
    for (size_t g = 0; g < s_.groups.size(); ++g) {
      std::map<int, bool> ready;
      for (const int stage : s_.groups[g].stages) {
        const auto& queue = entered_[s_.placement[stage]];
        ready[s_.placement[stage]] =
            !queue.empty() && queue.front() == static_cast<int>(g);
      }
      if (!std::all_of(ready.begin(), ready.end(),
                       [](const auto& r) { return r.second; })) {
        continue;
      }
      for (const auto& [rank, is_ready] : ready) entered_[rank].pop_front();
      any = any || !ready.empty();
    }
    return any;
  }

  const Schedule& s_;
  const RunOptions options_;
  uint64_t random_;
  std::vector<size_t> at_, half_;
  std::map<StageBatch, bool> begun_;
  std::map<StageBatch, Kept> kept_, stash_;
  std::map<Queue, std::deque<uint64_t>> queues_;
  std::vector<std::map<Queue, uint64_t>> inbox_;
  std::vector<std::deque<Message>> outbox_;
  std::map<std::tuple<int, bool, int>, uint64_t> local_;
  std::vector<double> most_;
  std::vector<uint64_t> sums_;
  std::vector<std::deque<int>> entered_;
  std::string wrong_;
};

}  // namespace

RunResult interpret(const Schedule& schedule, const RunOptions& options) {
  return Machine(schedule, options).run();
}

}  // namespace tapeline
