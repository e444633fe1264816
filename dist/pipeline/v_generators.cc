// Schedules of two stages a rank: stage r on the way down and stage 2p-1-r on
// the way up.
#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <utility>

#include "dist/pipeline/generators_internal.h"
#include "runtime/check.h"

namespace tapeline::internal {
namespace {

Schedule empty_v(int ranks, int micro_batches) {
  Schedule s;
  s.micro_batches = micro_batches;
  s.placement = v_placement(ranks);
  s.ranks.resize(ranks);
  return s;
}

// The list of one rank, as steps. A step is a kind and a way: F0 is the next
// forward pass on the way down, I1 and B1 the next backward ones on the way up;
// each takes its stage's micro-batches in order. W takes the I that waits
// longest, W0 and W1 that of one way.
class Steps {
 public:
  Steps(int rank, int ranks) : stage_{rank, 2 * ranks - 1 - rank} {}

  void repeat(int times, std::initializer_list<std::string_view> steps) {
    for (int i = 0; i < times; ++i) {
      for (const std::string_view step : steps) actions_.push_back(take(step));
    }
  }
  void overlap(std::string_view forward, std::string_view backward) {
    actions_.emplace_back(take(forward), take(backward));
  }
  void rest(std::string_view weight) {
    while (waits(weight) != waiting_.end()) actions_.push_back(take(weight));
  }
  int forwards(int way) const { return forwards_[way]; }
  std::vector<Action> actions() && { return std::move(actions_); }

 private:
  std::deque<Pass>::iterator waits(std::string_view weight) {
    return std::find_if(waiting_.begin(), waiting_.end(), [&](const Pass& p) {
      return weight.size() == 1 || p.stage == stage_[weight[1] - '0'];
    });
  }
  Pass take(std::string_view step) {
    if (step[0] == 'W') {
      const auto it = waits(step);
      CHECK(it != waiting_.end()) << "[schedule] no W waits";
      const Pass p = *it;
      waiting_.erase(it);
      return p;
    }
    const int way = step[1] - '0';
    if (step[0] == 'F') return forward(stage_[way], forwards_[way]++);
    const int j = backwards_[way]++;
    if (step[0] == 'B') return pass(PassKind::kBackward, stage_[way], j);
    waiting_.push_back(pass(PassKind::kWeight, stage_[way], j));
    return pass(PassKind::kInput, stage_[way], j);
  }

  std::array<int, 2> stage_, forwards_{}, backwards_{};
  std::deque<Pass> waiting_;
  std::vector<Action> actions_;
};

// Four legs of a micro-batch's way: F down and up, I back down and up. On leg k
// it reaches the leg's d-th rank at time start[k] + d * slope[k], and
// micro-batch j does so 6 j later: in those 6 units a rank runs F, I and W of
// two stages.
struct Block {
  static constexpr int kPeriod = 6;
  std::array<int, 4> slope, start{};
  int ranks;

  int time(int leg, int rank) const {
    return start[leg] + slope[leg] * (leg % 2 == 0 ? rank : ranks - 1 - rank);
  }
  bool collides(int leg) const {
    for (int r = 0; r < ranks; ++r) {
      for (int other = 0; other < leg; ++other) {
        if ((time(leg, r) - time(other, r)) % kPeriod == 0) return true;
      }
    }
    return false;
  }
};

// The legs follow each other as closely as no two meet on a rank.
Block make_block(int ranks, const std::array<int, 4>& slope) {
  Block block{.slope = slope, .ranks = ranks};
  for (int leg = 1; leg < 4; ++leg) {
    const int first = block.start[leg - 1] + slope[leg - 1] * (ranks - 1) + 1;
    block.start[leg] = first;
    while (block.collides(leg)) {
      CHECK_LT(++block.start[leg], first + Block::kPeriod);
    }
  }
  return block;
}

// F and I of one rank in the order in which the blocks of all micro-batches
// have them.
std::vector<Pass> block_order(const Block& block, int rank, int micro_batches) {
  const int up = 2 * block.ranks - 1 - rank;
  const std::array<Pass, 4> legs = {forward(rank, 0), forward(up, 0),
                                    pass(PassKind::kInput, up, 0),
                                    pass(PassKind::kInput, rank, 0)};
  std::vector<std::pair<int, Pass>> timed;
  for (int j = 0; j < micro_batches; ++j) {
    for (int leg = 0; leg < 4; ++leg) {
      Pass p = legs[leg];
      p.micro_batch = j;
      timed.emplace_back(block.time(leg, rank) + Block::kPeriod * j, p);
    }
  }
  std::sort(timed.begin(), timed.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Pass> out;
  for (const auto& [time, p] : timed) out.push_back(p);
  return out;
}

// Runs the ranks' orders of F and I at unit costs, and a W where a rank would
// wait or keep more than `limit` activations.
class WeightFiller {
 public:
  WeightFiller(Schedule& s, std::vector<std::vector<Pass>> orders, int limit)
      : s_(s),
        orders_(std::move(orders)),
        limit_(limit),
        done_(size_t{2} * s.stages() * s.micro_batches, kNever),
        ranks_(s.ranks.size()) {}

  void run() {
    for (int tick = 0; !finished(); ++tick) {
      bool any = false;
      for (size_t r = 0; r < ranks_.size(); ++r) any |= step(r, tick);
      CHECK(any) << "[schedule] nothing can run";
    }
  }

 private:
  static constexpr int kNever = -1;
  struct Rank {
    size_t at = 0;
    int alive = 0;
    std::deque<Pass> waiting;
  };

  int& done(const Pass& p, int stage) {
    const size_t row = size_t{2} * stage + (p.is_forward() ? 0 : 1);
    return done_[row * s_.micro_batches + p.micro_batch];
  }
  // What the pass needs was made in an earlier tick.
  bool ready(const Pass& p, int tick) {
    if (p.is_forward() && p.stage == 0) return true;
    const bool turns = !p.is_forward() && p.stage == s_.stages() - 1;
    const int made = turns ? done(forward(0, p.micro_batch), p.stage)
                           : done(p, p.stage + (p.is_forward() ? -1 : 1));
    return made != kNever && made < tick;
  }
  bool finished() const {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r].at < orders_[r].size() || !ranks_[r].waiting.empty()) {
        return false;
      }
    }
    return true;
  }
  bool step(size_t r, int tick) {
    Rank& rank = ranks_[r];
    if (rank.at < orders_[r].size()) {
      const Pass& p = orders_[r][rank.at];
      const bool full = p.is_forward() && rank.alive == limit_;
      if (!full && ready(p, tick)) {
        done(p, p.stage) = tick;
        ++rank.at;
        s_.ranks[r].emplace_back(p);
        if (p.is_forward()) {
          ++rank.alive;
        } else {
          rank.waiting.push_back(
              pass(PassKind::kWeight, p.stage, p.micro_batch));
        }
        return true;
      }
    }
    if (rank.waiting.empty()) return false;
    s_.ranks[r].emplace_back(rank.waiting.front());
    rank.waiting.pop_front();
    --rank.alive;
    return true;
  }

  Schedule& s_;
  const std::vector<std::vector<Pass>> orders_;
  const int limit_;
  std::vector<int> done_;  // tick, by (stage, F or I, micro-batch)
  std::vector<Rank> ranks_;
};

}  // namespace

Schedule zbv(int p, int micro_batches) {
  // The steady state needs 2p-1 micro-batches; with fewer, the later ones are
  // left out of the lists of more.
  const int m = std::max(micro_batches, 2 * p - 1);
  Schedule s = empty_v(p, micro_batches);
  for (int r = 0; r < p; ++r) {
    Steps steps(r, p);
    // Until the first micro-batch is back at rank r, going up.
    steps.repeat(2 * (p - r) - 1, {"F0"});
    // Until 2p-1 activations of a stage are kept.
    steps.repeat(r, {"F1", "F0"});
    // Until the gradient of the first comes up to rank r.
    steps.repeat(p - r, {"F1", "I1", "W1"});
    while (steps.forwards(1) < m) {
      if (steps.forwards(0) < m) steps.repeat(1, {"F0"});
      steps.repeat(1, {"I0", "W0", "F1", "I1", "W1"});
    }
    // Others wait for I, nobody for W.
    steps.repeat(r, {"I0", "I1"});
    steps.repeat(p - r, {"I0", "W0"});
    steps.rest("W1");
    steps.rest("W0");
    s.ranks[r] = std::move(steps).actions();
    std::erase_if(s.ranks[r], [&](const Action& a) {
      return a.passes()[0].micro_batch >= micro_batches;
    });
  }
  return s;
}

Schedule dualpipev(int p, int micro_batches) {
  Schedule s = empty_v(p, micro_batches);
  for (int r = 0; r < p; ++r) {
    Steps steps(r, p);
    const int below = p - 1 - r;
    // A first micro-batch needs below + 1 passes down and as many up.
    steps.repeat(2 * below, {"F0"});
    steps.repeat(r + 1, {"F0", "F1"});
    steps.repeat(below, {"I1", "W", "F1"});
    const int steady = micro_batches - 2 * p + r + 1;
    for (int i = 0; i < steady; ++i) {
      if (i == 0 && below == 0) {
        // The last rank has both halves of the turn: nobody gains by waiting
        // for a pair.
        steps.repeat(1, {"F0", "B1"});
      } else {
        steps.overlap("F0", "B1");
      }
      steps.overlap("F1", "B0");
    }
    for (int i = 0; i < below; ++i) {
      steps.repeat(1, {"B1"});
      steps.overlap("F1", "B0");
    }
    // Half of the drain whole, half with W left for the end.
    for (int i = 0; i < 2 * (r + 1); ++i) {
      const bool whole = i <= r;
      steps.repeat(
          1, {i % 2 == 0 ? (whole ? "B1" : "I1") : (whole ? "B0" : "I0")});
    }
    steps.repeat(below, {"W", "I0"});
    steps.rest("W");
    s.ranks[r] = std::move(steps).actions();
  }
  return s;
}

// The activation of a stage lives from its F to its W; over the period, the
// legs' slopes make how many live at once: all 1 for about p/3 micro-batches,
// and 1 and 2 in turn for about p/2.
Schedule v_memory(int ranks, int micro_batches, bool half, int limit) {
  Block block = make_block(ranks, {1, 1, 1, 1});
  if (half) {
    const Block slow_up = make_block(ranks, {1, 2, 1, 2});
    const Block slow_down = make_block(ranks, {2, 1, 2, 1});
    block = slow_down.start[3] < slow_up.start[3] ? slow_down : slow_up;
  }
  Schedule s = empty_v(ranks, micro_batches);
  std::vector<std::vector<Pass>> orders;
  for (int r = 0; r < ranks; ++r) {
    orders.push_back(block_order(block, r, micro_batches));
  }
  WeightFiller(s, std::move(orders), limit).run();
  return s;
}

}  // namespace tapeline::internal
