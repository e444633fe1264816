#include "dist/pipeline/validator.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dist/pipeline/operations.h"
#include "dist/pipeline/wait_graph.h"
#include "runtime/check.h"

namespace tapeline {
namespace {

using internal::WaitGraph;

Refusal refuse(Check check, const Schedule& s, int rank, int index,
               std::string message) {
  return {check, rank, index, to_string(s.ranks[rank][index]),
          std::move(message)};
}

// --- complete

struct Placed {
  Pass pass;
  int rank, index;

  // F, then B or I and W of one stage and micro-batch stand together.
  auto order() const {
    return std::tuple(pass.stage, pass.micro_batch, pass.kind, rank, index);
  }
};

std::optional<Refusal> check_pass(const Schedule& s, const Placed& p) {
  const auto refusal = [&](std::string message) {
    return refuse(Check::kComplete, s, p.rank, p.index, std::move(message));
  };
  if (p.pass.stage < 0 || p.pass.stage >= s.stages()) {
    return refusal(absl::StrCat("there are stages 0 to ", s.stages() - 1));
  }
  if (p.pass.micro_batch < 0 || p.pass.micro_batch >= s.micro_batches) {
    return refusal(
        absl::StrCat("there are micro-batches 0 to ", s.micro_batches - 1));
  }
  if (const int home = s.placement[p.pass.stage]; home != p.rank) {
    return refusal(absl::StrCat("stage ", p.pass.stage, " is on rank ", home));
  }
  return std::nullopt;
}

std::optional<Refusal> check_overlap(const Schedule& s, int rank, int index) {
  const std::span<const Pass> passes = s.ranks[rank][index].passes();
  if (passes.size() < 2 ||
      (passes[0].is_forward() && passes[1].kind == PassKind::kBackward)) {
    return std::nullopt;
  }
  return refuse(Check::kComplete, s, rank, index,
                "OV takes a forward and a whole backward pass");
}

std::optional<Refusal> missing(const Schedule& s, PassKind kind, int stage,
                               int micro_batch) {
  const int rank = s.placement[stage];
  return Refusal{Check::kComplete, rank, static_cast<int>(s.ranks[rank].size()),
                 to_string(pass(kind, stage, micro_batch)), "it is missing"};
}

// `found` are the passes of one stage and micro-batch, ordered by kind.
std::optional<Refusal> check_set(const Schedule& s, int stage, int micro_batch,
                                 std::span<const Placed> found) {
  const auto has = [&](PassKind kind) {
    return std::any_of(found.begin(), found.end(),
                       [&](const Placed& p) { return p.pass.kind == kind; });
  };
  for (size_t i = 1; i < found.size(); ++i) {
    const Placed& p = found[i];
    if (p.pass.kind == found[i - 1].pass.kind) {
      return refuse(Check::kComplete, s, p.rank, p.index,
                    absl::StrCat("it is there twice, first as action ",
                                 found[i - 1].index));
    }
    if (p.pass.kind == PassKind::kBackward && i > 1) {
      return refuse(Check::kComplete, s, p.rank, p.index,
                    "B is I and W, which are there too");
    }
  }
  if (!has(PassKind::kForward)) {
    return missing(s, PassKind::kForward, stage, micro_batch);
  }
  if (has(PassKind::kBackward)) return std::nullopt;
  const bool input = has(PassKind::kInput), weight = has(PassKind::kWeight);
  if (input && weight) return std::nullopt;
  return missing(s,
                 input    ? PassKind::kWeight
                 : weight ? PassKind::kInput
                          : PassKind::kBackward,
                 stage, micro_batch);
}

std::optional<Refusal> check_complete(const Schedule& s) {
  std::vector<Placed> all;
  for (int r = 0; r < static_cast<int>(s.ranks.size()); ++r) {
    for (int i = 0; i < static_cast<int>(s.ranks[r].size()); ++i) {
      if (auto refusal = check_overlap(s, r, i)) return refusal;
      for (const Pass& p : s.ranks[r][i].passes()) {
        all.push_back({p, r, i});
        if (auto refusal = check_pass(s, all.back())) return refusal;
      }
    }
  }
  std::sort(all.begin(), all.end(), [](const Placed& a, const Placed& b) {
    return a.order() < b.order();
  });
  size_t at = 0;
  for (int stage = 0; stage < s.stages(); ++stage) {
    for (int j = 0; j < s.micro_batches; ++j) {
      const size_t begin = at;
      while (at < all.size() && all[at].pass.stage == stage &&
             all[at].pass.micro_batch == j) {
        ++at;
      }
      const auto found =
          std::span<const Placed>(all).subspan(begin, at - begin);
      if (auto refusal = check_set(s, stage, j, found)) return refusal;
    }
  }
  return std::nullopt;
}

// --- channel

struct End {
  const Operation* operation;
  int rank;
};

std::string describe(const Operation& o) {
  return absl::StrCat(o.value.output ? "the output" : "the gradient",
                      " of stage ", o.value.stage, ", micro-batch ",
                      o.micro_batch);
}

// Sends and receives of each queue, in order.
std::optional<Refusal> check_channels(const Schedule& s, const Limits& limits) {
  using Queue = std::tuple<int, int, int, bool>;  // from, to, stage, output
  std::map<Queue, std::pair<std::vector<End>, std::vector<End>>> queues;
  const auto lists = operations(s, limits.ov_release);
  for (int r = 0; r < static_cast<int>(lists.size()); ++r) {
    for (const Operation& o : lists[r]) {
      if (o.kind == Operation::kRun) continue;
      const bool sends = o.kind == Operation::kSend;
      Queue queue{sends ? r : o.peer, sends ? o.peer : r, -1, false};
      if (!limits.queue_per_rank_pair) {
        std::get<2>(queue) = o.value.stage;
        std::get<3>(queue) = o.value.output;
      }
      auto& [sent, received] = queues[queue];
      (sends ? sent : received).push_back({&o, r});
    }
  }
  for (const auto& [queue, ends] : queues) {
    const auto& [sent, received] = ends;
    CHECK_EQ(sent.size(), received.size());
    for (size_t n = 0; n < sent.size(); ++n) {
      const Operation& from = *sent[n].operation;
      const Operation& to = *received[n].operation;
      if (from.value == to.value && from.micro_batch == to.micro_batch) {
        continue;
      }
      return refuse(
          Check::kChannel, s, received[n].rank, to.action,
          absl::StrCat("message ", n, " from rank ", sent[n].rank, " is ",
                       describe(from), "; it wants ", describe(to)));
    }
  }
  return std::nullopt;
}

// --- cycle

// "0B0 waits for 1B0, which follows 1F1 on rank 1, which waits for …"
std::string describe(const Schedule& s, const WaitGraph& graph,
                     const std::vector<int>& cycle) {
  std::vector<WaitGraph::Place> places;
  for (const int node : cycle) {
    if (places.empty() || !(places.back() == graph.place(node))) {
      places.push_back(graph.place(node));
    }
  }
  if (places.size() > 1 && places.front() == places.back()) places.pop_back();
  const auto action = [&](const WaitGraph::Place& p) {
    return to_string(s.ranks[p.rank][p.action]);
  };
  if (places.size() == 1) return "it waits for itself";
  std::string out = "it";
  constexpr int kMost = 12;
  int shown = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    const WaitGraph::Place& a = places[i];
    size_t j = (i + 1) % places.size();
    const bool follows =
        a.rank == places[j].rank && places[j].action < a.action;
    // Of a run of actions that follow each other the ends are enough.
    while (follows && j > i && j + 1 < places.size() &&
           places[j + 1].rank == a.rank &&
           places[j + 1].action < places[j].action) {
      ++j;
    }
    absl::StrAppend(&out, shown > 0 ? ", which" : "",
                    follows ? " follows " : " waits for ", action(places[j]),
                    " on rank ", places[j].rank);
    if (j <= i) break;
    if (++shown == kMost) return out + ", and so on";
    i = j - 1;
  }
  return out;
}

std::optional<Refusal> check_cycle(const Schedule& s, const Limits& limits) {
  const WaitGraph graph(s, limits.ov_release);
  std::vector<int> cycle = graph.cycle(limits.capacity);
  if (cycle.empty()) return std::nullopt;
  // Begin with an action that waits for one of another rank, or a later one.
  for (size_t i = 0; i < cycle.size(); ++i) {
    const WaitGraph::Place a = graph.place(cycle[0]);
    const WaitGraph::Place b = graph.place(cycle[1 % cycle.size()]);
    if (a.rank != b.rank || b.action > a.action) break;
    std::rotate(cycle.begin(), cycle.begin() + 1, cycle.end());
  }
  const WaitGraph::Place first = graph.place(cycle[0]);
  return refuse(Check::kCycle, s, first.rank, first.action,
                describe(s, graph, cycle));
}

// --- memory

std::optional<Refusal> check_memory(const Schedule& s, const Limits& limits) {
  if (limits.budget.empty()) return std::nullopt;
  CHECK(limits.budget.size() == 1 || limits.budget.size() == s.ranks.size());
  const std::vector<Peak> found = peaks(s, limits.holds);
  for (size_t r = 0; r < found.size(); ++r) {
    const double budget = limits.budget[limits.budget.size() == 1 ? 0 : r];
    if (found[r].value <= budget) continue;
    return refuse(Check::kMemory, s, static_cast<int>(r), found[r].index,
                  absl::StrCat("the rank keeps ", found[r].value,
                               " here, more than its ", budget));
  }
  return std::nullopt;
}

// --- collective

// By rank: the groups whose reduction it enters, in order, each with the action
// after which it does.
std::vector<std::vector<std::pair<int, int>>> reductions(const Schedule& s) {
  std::vector<int> last(s.stages(), -1);
  for (const std::vector<Action>& actions : s.ranks) {
    for (size_t i = 0; i < actions.size(); ++i) {
      for (const Pass& p : actions[i].passes()) {
        if (p.makes_weight_gradient()) last[p.stage] = static_cast<int>(i);
      }
    }
  }
  std::vector<std::vector<std::pair<int, int>>> out(s.ranks.size());
  for (size_t g = 0; g < s.groups.size(); ++g) {
    std::map<int, int> after;
    for (const int stage : s.groups[g].stages) {
      int& index = after.emplace(s.placement[stage], -1).first->second;
      index = std::max(index, last[stage]);
    }
    for (const auto& [rank, index] : after) {
      out[rank].emplace_back(index, static_cast<int>(g));
    }
  }
  for (auto& entered : out) std::sort(entered.begin(), entered.end());
  return out;
}

// Ranks enter reductions one after the other, and each waits for all its ranks.
std::optional<Refusal> check_collectives(const Schedule& s) {
  const auto entered = reductions(s);
  std::vector<int> ranks_of(s.groups.size(), 0);
  for (const auto& list : entered) {
    for (const auto& [index, g] : list) ++ranks_of[g];
  }
  std::vector<size_t> at(entered.size(), 0);
  std::vector<int> waiting(s.groups.size(), 0);
  std::vector<bool> counted(entered.size(), false);
  for (bool any = true; any;) {
    any = false;
    for (size_t r = 0; r < entered.size(); ++r) {
      if (at[r] == entered[r].size()) continue;
      const int g = entered[r][at[r]].second;
      if (!counted[r]) {
        counted[r] = true;
        ++waiting[g];
        any = true;
      }
      if (waiting[g] == ranks_of[g]) {
        counted[r] = false;
        ++at[r];
        any = true;
      }
    }
  }
  for (size_t r = 0; r < entered.size(); ++r) {
    if (at[r] == entered[r].size()) continue;
    const auto& [index, g] = entered[r][at[r]];
    return refuse(Check::kCollective, s, static_cast<int>(r), index,
                  absl::StrCat("after it the rank enters the reduction of ",
                               s.groups[g].name,
                               ", while others enter another one first"));
  }
  return std::nullopt;
}

void check_names(const Schedule& s) {
  for (const int rank : s.placement) {
    CHECK(rank >= 0 && rank < static_cast<int>(s.ranks.size()))
        << "[schedule] placement: rank " << rank << " of " << s.ranks.size();
  }
  for (const ReplicaGroup& group : s.groups) {
    for (const int stage : group.stages) {
      CHECK(stage >= 0 && stage < s.stages())
          << "[schedule] group " << group.name << ": stage " << stage << " of "
          << s.stages();
    }
  }
}

}  // namespace

std::string_view name_of(Check check) {
  constexpr std::string_view kNames[] = {"complete", "channel",    "cycle",
                                         "memory",   "collective", "order"};
  return kNames[static_cast<int>(check)];
}

std::string to_string(const Refusal& r) {
  return absl::StrCat(std::string(name_of(r.check)), ": rank ", r.rank,
                      ", action ", r.index, " (", r.action, "): ", r.message);
}

absl::Status to_status(const Refusal& refusal) {
  return absl::InvalidArgumentError(to_string(refusal));
}

std::optional<Refusal> validate(const Schedule& s, const Limits& limits) {
  check_names(s);
  if (auto refusal = check_complete(s)) return refusal;
  if (auto refusal = check_channels(s, limits)) return refusal;
  if (auto refusal = check_cycle(s, limits)) return refusal;
  if (auto refusal = check_memory(s, limits)) return refusal;
  return check_collectives(s);
}

std::optional<Refusal> check_order_of_sums(const Schedule& s) {
  std::vector<int> last(s.stages(), -1);
  for (int r = 0; r < static_cast<int>(s.ranks.size()); ++r) {
    for (int i = 0; i < static_cast<int>(s.ranks[r].size()); ++i) {
      for (const Pass& p : s.ranks[r][i].passes()) {
        if (!p.makes_weight_gradient()) continue;
        if (p.micro_batch < last[p.stage]) {
          return refuse(
              Check::kOrder, s, r, i,
              absl::StrCat("it comes after that of micro-batch ", last[p.stage],
                           ", so stage ", p.stage,
                           "'s gradients would be added in another order than "
                           "by one process and have other bits; let B and W of "
                           "a stage ascend"));
        }
        last[p.stage] = p.micro_batch;
      }
    }
  }
  return std::nullopt;
}

std::optional<int> min_capacity(const Schedule& s, OvRelease release) {
  const WaitGraph graph(s, release);
  // Small ones are likely. No channel has more messages than micro-batches.
  int low = 0, high = 0;
  while (!graph.cycle(high).empty()) {
    if (high >= s.micro_batches) return std::nullopt;
    low = high + 1;
    high = std::min(2 * high + 1, s.micro_batches);
  }
  while (low < high) {
    const int middle = (low + high) / 2;
    if (graph.cycle(middle).empty()) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace tapeline
