#include "dist/pipeline/lowering.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/check.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

// A rank's messages in order of use, with the slot of each.
struct SlotPlan {
  struct Message {
    Value value;
    int micro_batch = 0;
    int slot = 0;
  };
  std::vector<Message> messages;
  int slots = 0;
};

// Intervals in order of arrival, each in the first slot that is free by then:
// as many slots as intervals that overlap.
SlotPlan plan_slots(const std::vector<Waiting>& waiting, double makespan) {
  const double tick = std::max(makespan, 1e-300) * 1e-9;
  SlotPlan plan;
  std::vector<std::pair<int64_t, int64_t>> spans;
  for (const Waiting& w : waiting) {
    plan.messages.push_back({w.value, w.micro_batch});
    spans.emplace_back(std::llround(w.span.begin / tick),
                       std::llround(w.span.end / tick));
  }
  std::vector<size_t> order(spans.size());
  std::iota(order.begin(), order.end(), 0);
  // Of those that arrive together, who is used at once comes first.
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::tie(spans[a], a) < std::tie(spans[b], b);
  });
  std::vector<size_t> last;  // message by slot
  for (const size_t i : order) {
    size_t slot = 0;
    while (slot < last.size() &&
           (spans[last[slot]].second > spans[i].first || last[slot] > i)) {
      ++slot;
    }
    if (slot == last.size()) last.push_back(i);
    last[slot] = i;
    plan.messages[i].slot = static_cast<int>(slot);
  }
  plan.slots = static_cast<int>(last.size());
  return plan;
}

class RankLowering {
 public:
  RankLowering(const Schedule& s, int rank, const SlotPlan& slots)
      : s_(s), rank_(rank), slots_(slots), owed_(s.stages(), 0) {
    out_.slots = slots.slots;
    next_of_slot_.resize(slots.slots);
    next_of_channel_.resize(size_t{2} * s.stages());
    for (size_t i = slots.messages.size(); i-- > 0;) {
      const SlotPlan::Message& m = slots.messages[i];
      next_of_slot_[m.slot].push_back(i);
      next_of_channel_[channel_of(m.value)].push_back(i);
    }
    for (const Action& action : s.ranks[rank]) {
      for (const Pass& p : action.passes()) {
        owed_[p.stage] += p.makes_weight_gradient() ? 1 : 0;
      }
    }
    free_.assign(slots.slots, true);
    ask_all(0);
  }

  RankProgram run() && {
    const std::vector<Action>& actions = s_.ranks[rank_];
    for (size_t i = 0; i < actions.size(); ++i) {
      for (const Pass& p : actions[i].passes()) add(p, static_cast<int>(i));
    }
    CHECK_EQ(used_, slots_.messages.size());
    for (size_t g = 0; g < s_.groups.size(); ++g) {
      if (!shared(g)) continue;
      push({.kind = Instruction::kCollect,
            .action = static_cast<int>(actions.size()),
            .group = static_cast<int>(g)});
    }
    return std::move(out_);
  }

 private:
  void push(const Instruction& i) { out_.instructions.push_back(i); }

  // Everything whose slot is free, in the order of each channel.
  void ask_all(int action) {
    for (bool any = true; any;) {
      any = false;
      for (int slot = 0; slot < slots_.slots; ++slot) any |= ask(slot, action);
    }
  }
  bool ask(int slot, int action) {
    std::vector<size_t>& left = next_of_slot_[slot];
    if (!free_[slot] || left.empty()) return false;
    const SlotPlan::Message& m = slots_.messages[left.back()];
    std::vector<size_t>& queue = next_of_channel_[channel_of(m.value)];
    if (queue.back() != left.back()) return false;
    left.pop_back();
    queue.pop_back();
    free_[slot] = false;
    push({.kind = Instruction::kAsk,
          .action = action,
          .value = m.value,
          .stage = m.value.stage + (m.value.output ? 1 : -1),
          .micro_batch = m.micro_batch,
          .peer = s_.placement[m.value.stage],
          .slot = slot});
    return true;
  }

  void add(const Pass& p, int action) {
    for (const Value& value : needs(p, s_.stages())) {
      const int from = s_.placement[value.stage];
      if (from == rank_) continue;
      const SlotPlan::Message& m = slots_.messages.at(used_++);
      CHECK(m.value == value && m.micro_batch == p.micro_batch);
      push({.kind = Instruction::kTake,
            .action = action,
            .value = value,
            .stage = p.stage,
            .micro_batch = p.micro_batch,
            .peer = from,
            .slot = m.slot});
      free_[m.slot] = true;
      ask_all(action);
    }
    push({.kind = Instruction::kRun,
          .action = action,
          .pass = p,
          .stage = p.stage,
          .micro_batch = p.micro_batch});
    if (p.makes_weight_gradient()) {
      push({.kind = Instruction::kFree,
            .action = action,
            .stage = p.stage,
            .micro_batch = p.micro_batch});
    }
    const int next = p.stage + (p.is_forward() ? 1 : -1);
    if (p.kind != PassKind::kWeight && next >= 0 && next < s_.stages()) {
      const int to = s_.placement[next];
      push({.kind = to == rank_ ? Instruction::kHand : Instruction::kSend,
            .action = action,
            .value = {p.is_forward(), p.stage},
            .stage = next,
            .micro_batch = p.micro_batch,
            .peer = to == rank_ ? -1 : to});
    }
    if (p.makes_weight_gradient() && --owed_[p.stage] == 0) {
      complete(p.stage, action);
    }
  }

  // The rank's last pass that adds to the stage's weights is done.
  void complete(int stage, int action) {
    push({.kind = Instruction::kReduce, .action = action, .stage = stage});
    for (size_t g = 0; g < s_.groups.size(); ++g) {
      const std::vector<int>& stages = s_.groups[g].stages;
      const bool member =
          std::find(stages.begin(), stages.end(), stage) != stages.end();
      const bool all =
          std::all_of(stages.begin(), stages.end(), [&](int other) {
            return s_.placement[other] != rank_ || owed_[other] == 0;
          });
      if (!member || !all || !shared(g)) continue;
      push({.kind = Instruction::kOffer,
            .action = action,
            .group = static_cast<int>(g)});
    }
  }

  // Whether this rank and another have stages of the group.
  bool shared(size_t group) const {
    std::set<int> ranks;
    for (const int stage : s_.groups[group].stages) {
      ranks.insert(s_.placement[stage]);
    }
    return ranks.size() > 1 && ranks.count(rank_) > 0;
  }

  const Schedule& s_;
  const int rank_;
  const SlotPlan& slots_;
  size_t used_ = 0;
  // Messages to be asked for, from the last to the first.
  std::vector<std::vector<size_t>> next_of_slot_, next_of_channel_;
  std::vector<bool> free_;  // slots
  std::vector<int> owed_;   // weight gradients to come, by stage
  RankProgram out_;
};

std::string text(const Value& value, int micro_batch) {
  // An output by the pass that makes it, and so a gradient.
  return absl::StrCat(value.output ? "output " : "gradient ", value.stage, ".",
                      micro_batch);
}

}  // namespace

int channel_of(const Value& value) {
  return 2 * value.stage + (value.output ? 0 : 1);
}

int group_channel(const Schedule& s, int group) {
  return 2 * s.stages() + group;
}

absl::StatusOr<std::vector<RankProgram>> lower(const Schedule& s,
                                               const Costs& costs) {
  Costs early = costs;
  early.ov_release = OvRelease::kEarly;
  ASSIGN_OR_RETURN(const Simulation simulation, simulate(s, early));
  std::vector<RankProgram> out;
  for (size_t r = 0; r < s.ranks.size(); ++r) {
    const SlotPlan slots =
        plan_slots(simulation.waiting[r], simulation.makespan);
    out.push_back(RankLowering(s, static_cast<int>(r), slots).run());
  }
  return out;
}

std::string to_string(const Instruction& i) {
  switch (i.kind) {
    case Instruction::kAsk:
      return absl::StrCat("ask ", text(i.value, i.micro_batch), " of rank ",
                          i.peer, " slot ", i.slot);
    case Instruction::kTake:
      return absl::StrCat("take ", text(i.value, i.micro_batch), " of rank ",
                          i.peer, " slot ", i.slot);
    case Instruction::kRun:
      return absl::StrCat("run ", to_string(i.pass));
    case Instruction::kHand:
      return absl::StrCat("hand ", text(i.value, i.micro_batch), " to stage ",
                          i.stage);
    case Instruction::kSend:
      return absl::StrCat("send ", text(i.value, i.micro_batch), " to rank ",
                          i.peer);
    case Instruction::kFree:
      return absl::StrCat("free ", i.stage, ".", i.micro_batch);
    case Instruction::kReduce:
      return absl::StrCat("reduce stage ", i.stage);
    case Instruction::kOffer:
      return absl::StrCat("offer group ", i.group);
    case Instruction::kCollect:
      return absl::StrCat("collect group ", i.group);
  }
  return "";
}

std::string program_text(const RankProgram& program) {
  std::string out;
  for (const Instruction& i : program.instructions) {
    absl::StrAppend(&out, to_string(i), "\n");
  }
  return out;
}

}  // namespace tapeline
