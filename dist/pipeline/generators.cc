#include "dist/pipeline/generators.h"

#include <algorithm>
#include <functional>

#include "absl/strings/str_cat.h"
#include "dist/pipeline/generators_internal.h"
#include "dist/pipeline/text.h"
#include "runtime/edit_distance.h"

namespace tapeline {
namespace {

using internal::LoopRule;

struct Generator {
  std::string name;
  int chunks;                  // 0: any
  int micro_batches_per_rank;  // at least so many
  std::function<Schedule(int p, int v, int m, int group)> make;
};

Generator loop(const std::string& name, int chunks, const LoopRule& rule) {
  return {name, chunks, 0, [rule](int p, int v, int m, int group) {
            return internal::loop_schedule(rule, p, v, m, group);
          }};
}

const std::vector<Generator>& generators() {
  static const std::vector<Generator>& all = *new std::vector<Generator>{
      loop("gpipe", 1, {.all_forwards_first = true}),
      loop("1f1b", 1, {.warm_up_per_hop = 1}),
      loop("eager_1f1b", 1, {.warm_up_per_hop = 2}),
      loop("interleaved", 0, {.warm_up_per_hop = 2}),
      {"looped_bfs", 0, 0,
       [](int p, int v, int m, int) {
         return internal::loop_schedule({.all_forwards_first = true}, p, v, m,
                                        m);
       }},
      loop("zb1p", 0,
           {.warm_up_per_hop = 1, .split = true, .delay_per_rank = 1}),
      loop("zb_h2", 1,
           {.warm_up_per_hop = 2, .split = true, .delay_per_rank = 2}),
      {"zbv", 2, 0, [](int p, int, int m, int) { return internal::zbv(p, m); }},
      {"v_half", 2, 0,
       [](int p, int, int m, int) {
         return internal::v_memory(p, m, true, p + 2);
       }},
      {"v_min", 2, 0,
       [](int p, int, int m, int) {
         return internal::v_memory(p, m, false, (2 * p + 12) / 3);
       }},
      {"dualpipev", 2, 2,
       [](int p, int, int m, int) { return internal::dualpipev(p, m); }},
  };
  return all;
}

const Generator* find(std::string_view name) {
  for (const Generator& g : generators()) {
    if (g.name == name) return &g;
  }
  return nullptr;
}

absl::Status check_range(std::string_view what, int64_t value) {
  if (value >= 1 && value <= kMaxCount) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(what), " is ", value, "; use 1 to ", kMaxCount));
}

absl::Status check(const Generator& g, const ScheduleSize& size) {
  for (const auto& [what, value] :
       {std::pair{"ranks", size.ranks},
        {"chunks", size.chunks},
        {"micro_batches", size.micro_batches},
        {"group", size.group == 0 ? 1 : size.group}}) {
    if (absl::Status s = check_range(what, value); !s.ok()) return s;
  }
  if (size.ranks * size.chunks > kMaxCount ||
      size.ranks * size.chunks * size.micro_batches > kMaxPasses) {
    return absl::InvalidArgumentError(absl::StrCat(
        size.ranks, " ranks of ", size.chunks, " chunks and ",
        size.micro_batches, " micro-batches are more than ", kMaxCount,
        " stages or ", kMaxPasses, " forward passes; lower one of them"));
  }
  if (g.chunks != 0 && size.chunks != g.chunks) {
    return absl::InvalidArgumentError(
        absl::StrCat(g.name, " needs chunks = ", g.chunks, ", not ",
                     size.chunks, "; interleaved takes any"));
  }
  if (size.micro_batches < g.micro_batches_per_rank * size.ranks) {
    return absl::InvalidArgumentError(absl::StrCat(
        g.name, " on ", size.ranks, " ranks needs at least ",
        g.micro_batches_per_rank * size.ranks, " micro-batches, not ",
        size.micro_batches, "; use zbv for fewer"));
  }
  return absl::OkStatus();
}

}  // namespace

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string>& names = *[] {
    auto* list = new std::vector<std::string>;
    for (const Generator& g : generators()) list->push_back(g.name);
    return list;
  }();
  return names;
}

int default_chunks(std::string_view name) {
  const Generator* g = find(name);
  return g == nullptr ? 1 : std::max(1, g->chunks);
}

absl::StatusOr<Schedule> make_schedule(std::string_view name,
                                       const ScheduleSize& size) {
  const Generator* g = find(name);
  if (g == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("no schedule '", std::string(name), "'",
                     suggestion(name, schedule_names())));
  }
  if (absl::Status s = check(*g, size); !s.ok()) return s;
  const int64_t group = size.group == 0 ? size.ranks : size.group;
  return g->make(static_cast<int>(size.ranks), static_cast<int>(size.chunks),
                 static_cast<int>(size.micro_batches), static_cast<int>(group));
}

}  // namespace tapeline
