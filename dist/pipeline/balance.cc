#include "dist/pipeline/balance.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <utility>

#include "runtime/check.h"

namespace tapeline {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Differences below it are rounding.
constexpr double kRounding = 1e-12;
// Of one search, less than a second.
constexpr int64_t kMostSteps = int64_t{1} << 22;
// Longest run of neighbouring cuts that move together.
constexpr size_t kMostMoved = 32;

class Balancer {
 public:
  Balancer(const std::vector<double>& times, const std::vector<int>& placement)
      : placement_(placement),
        units_(times.size()),
        stages_(placement.size()),
        before_(units_ + 1, 0),
        open_(stages_ + 1, 0),
        closes_(stages_, false) {
    for (size_t i = 0; i < units_; ++i) before_[i + 1] = before_[i] + times[i];
    const int ranks = 1 + *std::max_element(placement.begin(), placement.end());
    load_.resize(ranks, 0);
    std::vector<bool> seen(ranks, false);
    for (size_t k = stages_; k-- > 0;) {
      closes_[k] = !seen[placement[k]];
      open_[k] = open_[k + 1] + (closes_[k] ? 1 : 0);
      seen[placement[k]] = true;
    }
    set_suffixes();
  }

  BalancedCut run(double slack) {
    std::vector<size_t> ends = most_even();
    // A good cut first: the search needs only look for better ones.
    improve(ends, [&](const std::vector<size_t>& cut) {
      return Cost{busiest(cut), squares_of_loads(cut), squares(cut)};
    });
    best_ = ends;
    limit_ = busiest(ends) * (1 - kRounding);
    most_squares_ = kInfinity;
    bool proven = limit_ == 0 || search();
    const double least = busiest(best_);

    const double allowed = least * (1 + slack) * (1 + kRounding);
    ends = most_even();
    if (busiest(ends) > allowed) {
      ends = best_;
      improve(ends, [&](const std::vector<size_t>& cut) {
        const double most = busiest(cut);
        return Cost{most <= allowed ? 0 : most, squares(cut), 0};
      });
      best_ = ends;
      limit_ = allowed;
      most_squares_ = squares(ends) * (1 - kRounding);
      proven = search() && proven;
      ends = best_;
    }
    return {{ends, busiest(ends)}, least, proven};
  }

 private:
  using Cost = std::array<double, 3>;  // the first counts most

  double time(const std::vector<size_t>& ends, size_t k) const {
    return before_[ends[k]] - before_[k == 0 ? 0 : ends[k - 1]];
  }
  void set_loads(const std::vector<size_t>& ends) {
    std::fill(load_.begin(), load_.end(), 0);
    for (size_t k = 0; k < stages_; ++k) load_[placement_[k]] += time(ends, k);
  }
  double busiest(const std::vector<size_t>& ends) {
    set_loads(ends);
    return *std::max_element(load_.begin(), load_.end());
  }
  double squares_of_loads(const std::vector<size_t>& ends) {
    set_loads(ends);
    double sum = 0;
    for (const double load : load_) sum += load * load;
    return sum;
  }
  double squares(const std::vector<size_t>& ends) const {
    double sum = 0;
    for (size_t k = 0; k < stages_; ++k) sum += time(ends, k) * time(ends, k);
    return sum;
  }

  // suffix_[k][at]: the least sum of squares of stages from k on over the parts
  // from `at` on, whatever the ranks, and where its first stage ends.
  void set_suffixes() {
    suffix_.assign(stages_ + 1, std::vector<double>(units_ + 1, kInfinity));
    next_.assign(stages_, std::vector<size_t>(units_ + 1, units_));
    suffix_[stages_][units_] = 0;
    for (size_t k = stages_; k-- > 0;) {
      for (size_t at = 0; at <= units_; ++at) {
        for (size_t end = at; end <= units_; ++end) {
          const double t = before_[end] - before_[at];
          if (t * t >= suffix_[k][at]) break;
          const double value = t * t + suffix_[k + 1][end];
          if (value < suffix_[k][at]) {
            suffix_[k][at] = value;
            next_[k][at] = end;
          }
        }
      }
    }
  }
  std::vector<size_t> most_even() const {
    std::vector<size_t> ends;
    size_t at = 0;
    for (size_t k = 0; k < stages_; ++k) ends.push_back(at = next_[k][at]);
    return ends;
  }

  // Moves runs of neighbouring cuts by one part while that costs less.
  template <class F>
  void improve(std::vector<size_t>& ends, const F& cost_of) {
    Cost best = cost_of(ends);
    for (bool any = true; any;) {
      any = false;
      for (size_t i = 0; i + 1 < stages_; ++i) {
        for (size_t j = i; j + 1 < stages_ && j < i + kMostMoved; ++j) {
          for (const int by : {-1, 1}) {
            std::vector<size_t> moved = ends;
            if (!move(moved, i, j, by)) continue;
            const Cost cost = cost_of(moved);
            if (!(cost < best)) continue;
            best = cost;
            ends = std::move(moved);
            any = true;
          }
        }
      }
    }
  }
  static bool move(std::vector<size_t>& ends, size_t i, size_t j, int by) {
    const size_t low = i == 0 ? 0 : ends[i - 1], high = ends[j + 1];
    if (by < 0 ? ends[i] == low : ends[j] == high) return false;
    for (size_t k = i; k <= j; ++k) ends[k] += by;
    return true;
  }

  // Looks for cuts within limit_ and below most_squares_, tightening the one
  // that is wanted with each that it finds. True if it looked everywhere.
  bool search() {
    std::fill(load_.begin(), load_.end(), 0);
    open_load_ = 0;
    steps_ = 0;
    ends_.assign(stages_, 0);
    descend(0, 0, 0);
    return steps_ <= kMostSteps;
  }
  void descend(size_t k, size_t at, double squares) {
    if (++steps_ > kMostSteps) return;
    if (k == stages_) {
      best_ = ends_;
      if (most_squares_ == kInfinity) {
        limit_ =
            *std::max_element(load_.begin(), load_.end()) * (1 - kRounding);
      } else {
        most_squares_ = squares * (1 - kRounding);
      }
      return;
    }
    double& load = load_[placement_[k]];
    const double load_was = load, open_was = open_load_;
    for (size_t end = k + 1 == stages_ ? units_ : at; end <= units_; ++end) {
      const double t = before_[end] - before_[at];
      if (load_was + t > limit_) break;
      const double sum = squares + t * t;
      if (sum + suffix_[k + 1][end] >= most_squares_) continue;
      // The rest must fit into ranks that have stages to come.
      const double open_load = open_was + (closes_[k] ? -load_was : t);
      const double rest = before_[units_] - before_[end];
      if (rest >
          open_[k + 1] * limit_ - open_load + kRounding * before_[units_]) {
        continue;
      }
      load = load_was + t;
      open_load_ = open_load;
      ends_[k] = end;
      descend(k + 1, end, sum);
      load = load_was;
      open_load_ = open_was;
      if (steps_ > kMostSteps) return;
    }
  }

  const std::vector<int>& placement_;
  const size_t units_, stages_;
  std::vector<double> before_;  // time of the parts before each
  std::vector<int> open_;       // ranks with stages from this one on
  std::vector<bool> closes_;    // stages that are their rank's last
  std::vector<std::vector<double>> suffix_;
  std::vector<std::vector<size_t>> next_;

  std::vector<double> load_;  // by rank
  double open_load_ = 0;      // of ranks with stages to come
  double limit_ = 0, most_squares_ = 0;
  int64_t steps_ = 0;
  std::vector<size_t> ends_, best_;
};

}  // namespace

BalancedCut balanced_cut(const std::vector<double>& times,
                         const std::vector<int>& placement, double slack) {
  CHECK(!times.empty() && times.size() <= kMostBalancedParts)
      << "[balance] " << times.size() << " parts";
  CHECK(!placement.empty() && placement.size() <= kMostBalancedStages)
      << "[balance] " << placement.size() << " stages";
  return Balancer(times, placement).run(slack);
}

double busiest_rank(const std::vector<double>& times,
                    const std::vector<int>& placement,
                    const std::vector<size_t>& ends) {
  CHECK_EQ(ends.size(), placement.size());
  std::vector<double> load;
  size_t at = 0;
  for (size_t k = 0; k < ends.size(); ++k) {
    const auto rank = static_cast<size_t>(placement[k]);
    if (rank >= load.size()) load.resize(rank + 1, 0);
    for (; at < ends[k]; ++at) load[rank] += times[at];
  }
  return *std::max_element(load.begin(), load.end());
}

Layout joined(const Layout& parts, const std::vector<size_t>& ends) {
  Layout out;
  int layers = 0, depths = 0;
  size_t at = 0;
  for (const size_t end : ends) {
    StageParts stage{.first_layer = layers, .first_depth = depths};
    for (; at < end; ++at) {
      stage.embedding |= parts[at].embedding;
      stage.head |= parts[at].head;
      stage.layers += parts[at].layers;
      stage.depths += parts[at].depths;
    }
    layers += stage.layers;
    depths += stage.depths;
    out.push_back(stage);
  }
  return out;
}

}  // namespace tapeline
