#include "dist/pipeline/simulator.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "dist/pipeline/validator.h"
#include "dist/pipeline/wake_queue.h"
#include "runtime/check.h"

namespace tapeline {
namespace {

class Simulator {
 public:
  Simulator(const Schedule& s, const Costs& costs)
      : s_(s),
        costs_(costs),
        made_(size_t{2} * s.stages() * s.micro_batches, -1),
        recompute_(made_.size() / 2),
        clock_(s.ranks.size(), 0),
        half_begin_(s.ranks.size(), 0),
        woken_(static_cast<int>(s.ranks.size())) {
    out_.waiting.resize(s.ranks.size());
    out_.busy.resize(s.ranks.size(), 0);
    out_.actions.resize(s.ranks.size());
  }

  Simulation run() && {
    while (const std::optional<int> rank = woken_.next()) {
      while (step(*rank)) {
      }
    }
    finish();
    return std::move(out_);
  }

 private:
  const StageCosts& cost_of(int stage) const {
    return costs_.stages[costs_.stages.size() == 1 ? 0 : stage];
  }
  size_t key(bool output, int stage, int micro_batch) const {
    return (size_t(stage) * 2 + (output ? 0 : 1)) * s_.micro_batches +
           micro_batch;
  }
  double cost(const Pass& p) const {
    const StageCosts& c = cost_of(p.stage);
    if (p.is_forward()) return c.forward;
    if (p.kind == PassKind::kWeight) return c.weight;
    const bool replays =
        recompute_[size_t(p.stage) * s_.micro_batches + p.micro_batch];
    return (p.kind == PassKind::kInput ? c.input : c.whole_backward()) +
           (replays ? c.forward : 0);
  }
  // When the value is on the rank; nothing: it is not made yet.
  std::optional<double> arrival(const Value& value, const Pass& p,
                                int rank) const {
    const double made = made_[key(value.output, value.stage, p.micro_batch)];
    if (made < 0) return std::nullopt;
    return made + (s_.placement[value.stage] == rank ? 0 : costs_.latency);
  }
  std::optional<double> ready(std::span<const Pass> passes, int rank) const {
    double when = 0;
    for (const Pass& p : passes) {
      for (const Value& value : needs(p, s_.stages())) {
        const std::optional<double> at = arrival(value, p, rank);
        if (!at) return std::nullopt;
        when = std::max(when, *at);
      }
    }
    return when;
  }
  void record(std::span<const Pass> passes, int rank, double begin,
              double duration) {
    clock_[rank] = begin + duration;
    out_.busy[rank] += duration;
    for (const Pass& p : passes) {
      for (const Value& value : needs(p, s_.stages())) {
        if (s_.placement[value.stage] == rank) continue;
        out_.waiting[rank].push_back(
            {value, p.micro_batch, {*arrival(value, p, rank), begin}});
      }
      if (p.is_forward()) {
        recompute_[size_t(p.stage) * s_.micro_batches + p.micro_batch] =
            p.recompute;
      }
      if (p.kind != PassKind::kWeight) {
        made_[key(p.is_forward(), p.stage, p.micro_batch)] = clock_[rank];
        const int next = p.stage + (p.is_forward() ? 1 : -1);
        if (next >= 0 && next < s_.stages()) woken_.wake(s_.placement[next]);
      }
    }
  }

  bool step(int rank) {
    std::vector<Span>& done = out_.actions[rank];
    if (done.size() == s_.ranks[rank].size()) return false;
    const Action& action = s_.ranks[rank][done.size()];
    const std::span<const Pass> passes = action.passes();
    double duration = cost(passes[0]);
    double share = 1;  // of OV's cost in that of its halves
    if (action.overlapped()) {
      const double halves = duration + cost(passes[1]);
      duration = cost_of(passes[0].stage).overlapped.value_or(halves);
      share = halves > 0 ? duration / halves : 1;
    }
    if (action.overlapped() && costs_.ov_release == OvRelease::kEarly) {
      return halves(rank, action, share);
    }
    const std::optional<double> when = ready(passes, rank);
    if (!when) return false;
    const double begin = std::max(clock_[rank], *when);
    record(passes, rank, begin, duration);
    done.push_back({begin, clock_[rank]});
    return true;
  }

  bool halves(int rank, const Action& action, double share) {
    const std::span<const Pass> first = action.passes().first(1);
    const std::span<const Pass> second = action.passes().last(1);
    const bool first_done =
        made_[key(true, first[0].stage, first[0].micro_batch)] >= 0;
    if (!first_done) {
      const std::optional<double> when = ready(first, rank);
      if (!when) return false;
      const double begin = std::max(clock_[rank], *when);
      record(first, rank, begin, share * cost(first[0]));
      half_begin_[rank] = begin;
    }
    const std::optional<double> when = ready(second, rank);
    if (!when) return !first_done;
    const double begin = std::max(clock_[rank], *when);
    record(second, rank, begin, share * cost(second[0]));
    out_.actions[rank].push_back({half_begin_[rank], clock_[rank]});
    return true;
  }

  int most_waiting(int rank) const {
    // Times that are equal but for rounding count as equal.
    const double tick = std::max(out_.makespan, 1e-300) * 1e-9;
    std::vector<std::pair<int64_t, int>> events;
    for (const Waiting& wait : out_.waiting[rank]) {
      const int64_t begin = std::llround(wait.span.begin / tick);
      const int64_t end = std::llround(wait.span.end / tick);
      if (begin == end) continue;
      events.push_back({begin, 1});
      events.push_back({end, -1});
    }
    std::sort(events.begin(), events.end());
    int live = 0, most = 0;
    for (const auto& [time, change] : events) {
      most = std::max(most, live += change);
    }
    return most;
  }

  void finish() {
    double idle = 0;
    for (const double end : clock_) {
      out_.makespan = std::max(out_.makespan, end);
    }
    for (size_t r = 0; r < clock_.size(); ++r) {
      CHECK_EQ(out_.actions[r].size(), s_.ranks[r].size());
      out_.idle.push_back(out_.makespan - out_.busy[r]);
      idle += out_.idle.back();
      out_.idle_inside.push_back(out_.actions[r].empty()
                                     ? 0
                                     : clock_[r] - out_.actions[r][0].begin -
                                           out_.busy[r]);
      out_.slots.push_back(most_waiting(static_cast<int>(r)));
    }
    const double all = out_.makespan * static_cast<double>(clock_.size());
    out_.bubble = all > 0 ? idle / all : 0;
  }

  const Schedule& s_;
  const Costs& costs_;
  std::vector<double> made_;     // when, by value and micro-batch; -1: not yet
  std::vector<bool> recompute_;  // by stage and micro-batch
  std::vector<double> clock_;    // end of each rank's latest pass
  std::vector<double> half_begin_;
  internal::WakeQueue woken_;
  Simulation out_;
};

}  // namespace

absl::StatusOr<Simulation> simulate(const Schedule& s, const Costs& costs) {
  CHECK(costs.stages.size() == 1 || costs.stages.size() == s.placement.size())
      << "[schedule] costs: " << costs.stages.size() << " for " << s.stages()
      << " stages";
  if (const auto refusal = validate(s, {.ov_release = costs.ov_release})) {
    return to_status(*refusal);
  }
  return Simulator(s, costs).run();
}

}  // namespace tapeline
