#include "dist/pipeline/testing/mutants.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "dist/pipeline/generators.h"
#include "dist/pipeline/testing/interpreter.h"
#include "dist/pipeline/text.h"
#include "dist/pipeline/validator.h"
#include "runtime/random.h"

namespace tapeline {
namespace {

class Dice {
 public:
  Dice(uint64_t seed, std::string_view name) : random_(seed, name) {}
  // 0 to n - 1; 0 for n = 0.
  int below(size_t n) {
    return n == 0 ? 0 : static_cast<int>(random_.below(n, at_++));
  }

 private:
  Random random_;
  uint64_t at_ = 0;
};

using Actions = std::vector<Action>;

bool is_single(const Action& a, PassKind kind) {
  return !a.overlapped() && a.passes()[0].kind == kind;
}

Action taken(Actions& list, int i) {
  const Action a = list[i];
  list.erase(list.begin() + i);
  return a;
}
void put(Actions& list, int i, const Action& a) {
  list.insert(list.begin() + std::min<size_t>(i, list.size()), a);
}

// The first action from a random one on that is of the kind; -1: none.
int find(const Actions& list, PassKind kind, Dice& dice) {
  const auto n = static_cast<int>(list.size());
  const int begin = dice.below(n);
  for (int k = 0; k < n; ++k) {
    if (is_single(list[(begin + k) % n], kind)) return (begin + k) % n;
  }
  return -1;
}

void split(Actions& list, Dice& dice) {
  const int i = find(list, PassKind::kBackward, dice);
  if (i < 0) return;
  Pass p = list[i].passes()[0];
  p.kind = PassKind::kInput;
  list[i] = p;
  p.kind = PassKind::kWeight;
  put(list, i + 1 + dice.below(list.size() - i), p);
}

void join(Actions& list, Dice& dice) {
  const int i = find(list, PassKind::kInput, dice);
  if (i < 0) return;
  Pass p = list[i].passes()[0];
  p.kind = PassKind::kWeight;
  std::erase(list, Action(p));
  p.kind = PassKind::kBackward;
  list[std::min<size_t>(i, list.size() - 1)] = p;
}

void fuse(Actions& list, Dice& dice) {
  const int i = find(list, PassKind::kForward, dice);
  const int j = find(list, PassKind::kBackward, dice);
  if (i < 0 || j < 0) return;
  const Pass f = list[i].passes()[0], b = list[j].passes()[0];
  list.erase(list.begin() + std::max(i, j));
  list[std::min(i, j)] = Action(f, b);
}

void unfuse(Actions& list, Dice& dice) {
  for (size_t i = dice.below(list.size()); i < list.size(); ++i) {
    if (!list[i].overlapped()) continue;
    const Action pair = list[i];
    const int first = dice.below(2);
    list[i] = pair.passes()[first];
    put(list, static_cast<int>(i) + 1 + dice.below(2) * dice.below(3),
        pair.passes()[1 - first]);
    return;
  }
}

void change(Schedule& s, Pass& p, int what, Dice& dice) {
  if (what == 0) p.stage = dice.below(s.stages() + 1);
  if (what == 1) p.micro_batch = dice.below(s.micro_batches + 1);
  if (what == 2) p.kind = static_cast<PassKind>(dice.below(4));
}

std::optional<Schedule> random_schedule(Dice& dice) {
  const std::vector<std::string>& names = schedule_names();
  const std::string& name = names[dice.below(names.size())];
  ScheduleSize size{.ranks = 1 + dice.below(5),
                    .chunks = default_chunks(name),
                    .micro_batches = 1 + dice.below(8)};
  if (name == "interleaved" || name == "looped_bfs" || name == "zb1p") {
    size.chunks = 1 + dice.below(3);
  }
  absl::StatusOr<Schedule> s = make_schedule(name, size);
  if (!s.ok()) return std::nullopt;
  for (int g = dice.below(4); g > 0; --g) {
    ReplicaGroup group{.name = std::string("g") + std::to_string(g)};
    for (int k = 1 + dice.below(3); k > 0; --k) {
      group.stages.push_back(dice.below(s->stages()));
    }
    s->groups.push_back(group);
  }
  return *s;
}

// Passes of a rank with B and OV taken apart.
std::vector<std::vector<Pass>> order(const Schedule& s) {
  std::vector<std::vector<Pass>> out;
  for (const Actions& list : s.ranks) {
    std::vector<Pass>& passes = out.emplace_back();
    for (const Action& a : list) {
      for (Pass p : a.passes()) {
        if (p.kind == PassKind::kBackward) {
          p.kind = PassKind::kInput;
          passes.push_back(p);
          p.kind = PassKind::kWeight;
        }
        passes.push_back(p);
      }
    }
  }
  return out;
}

}  // namespace

Schedule mutate(const Schedule& schedule, uint64_t seed) {
  Dice dice(seed, "mutate");
  Schedule s = schedule;
  Actions& list = s.ranks[dice.below(s.ranks.size())];
  if (list.empty()) return s;
  const int i = dice.below(list.size());
  switch (dice.below(14)) {
    case 0:
      std::swap(list[i], list[dice.below(list.size())]);
      break;
    // Neighbours are what can often change places; a W can wait.
    case 1:
    case 10:
    case 11:
      std::swap(list[i], list[std::min<size_t>(i + 1, list.size() - 1)]);
      break;
    case 2: {
      const Action a = taken(list, i);
      put(list, dice.below(list.size() + 1), a);
      break;
    }
    case 3: {
      const Action a = taken(list, i);
      Actions& other = s.ranks[dice.below(s.ranks.size())];
      put(other, dice.below(other.size() + 1), a);
      break;
    }
    case 4: {
      const std::span<Pass> passes = list[i].passes();
      change(s, passes[dice.below(passes.size())], dice.below(3), dice);
      break;
    }
    case 5:
      split(list, dice);
      break;
    case 6:
      join(list, dice);
      break;
    case 7:
      fuse(list, dice);
      break;
    case 8:
      unfuse(list, dice);
      break;
    case 9:
      taken(list, i);
      break;
    case 12:
      if (const int w = find(list, PassKind::kWeight, dice); w >= 0) {
        const Action a = taken(list, w);
        put(list, w + dice.below(list.size() + 1 - w), a);
      }
      break;
    default:
      put(list, dice.below(list.size() + 1), list[i]);
  }
  return s;
}

FuzzCounts fuzz_schedules(int64_t cases, uint64_t seed, std::ostream& log) {
  FuzzCounts counts;
  for (const Check check : {Check::kComplete, Check::kChannel, Check::kCycle,
                            Check::kMemory, Check::kCollective}) {
    counts.rejected[std::string(name_of(check))] = 0;
  }
  for (uint64_t n = 0; counts.cases < cases; ++n) {
    Dice dice(seed * 0x9E3779B97F4A7C15 + n, "fuzz");
    const std::optional<Schedule> base = random_schedule(dice);
    if (!base) continue;
    Schedule s = *base;
    for (int k = 1 + dice.below(3) / 2 * dice.below(3); k > 0; --k) {
      s = mutate(s, seed * 1000003 + n * 4 + k);
    }
    const OvRelease release =
        dice.below(2) == 0 ? OvRelease::kEnd : OvRelease::kEarly;
    std::optional<int> capacity;
    if (dice.below(2) == 0) capacity = dice.below(3);
    // Sums of these are exact.
    const double stash = 0.5 * dice.below(5);
    Limits limits = {.ov_release = release, .capacity = capacity};
    limits.holds = {{.forward = 1, .parked = 0, .stash = stash}};
    if (dice.below(3) == 0) limits.budget = {1.0 + dice.below(8)};
    const auto refusal = validate(s, limits);
    const RunResult run = interpret(s, {.ov_release = release,
                                        .capacity = capacity,
                                        .seed = n,
                                        .forward_weight = 1,
                                        .stash_weight = stash});
    const bool fits =
        limits.budget.empty() ||
        std::all_of(run.most.begin(), run.most.end(),
                    [&](double most) { return most <= limits.budget[0]; });
    const bool right = run.outcome == Outcome::kRight && fits;
    ++counts.cases;
    if (refusal) {
      ++counts.rejected[std::string(name_of(refusal->check))];
      counts.rejected_but_ran += right ? 1 : 0;
    } else {
      ++counts.accepted;
      counts.accepted_reordered += order(s) != order(*base) ? 1 : 0;
      counts.hung += run.outcome == Outcome::kHung ? 1 : 0;
      counts.wrong_gradients += run.outcome == Outcome::kWrong ? 1 : 0;
      counts.over_budget += fits ? 0 : 1;
    }
    if (right != !refusal) {
      log << "case " << n << (release == OvRelease::kEnd ? "" : ", early")
          << ", capacity " << capacity.value_or(-1) << ": "
          << (refusal ? to_string(*refusal) : "accepted")
          << "; ran: " << (right ? "right" : run.what) << "\n"
          << schedule_text(s);
    }
  }
  return counts;
}

}  // namespace tapeline
