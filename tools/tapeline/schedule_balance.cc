#include "tools/tapeline/schedule_balance.h"

#include <cstddef>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dist/pipeline/balance.h"
#include "runtime/file.h"
#include "runtime/json.h"
#include "runtime/status.h"
#include "tools/tapeline/verbs.h"

namespace tapeline {
namespace {

// What `tapeline bench --stages --json` prints.
absl::StatusOr<Json> read_measured(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, read_file(user_path(path)));
  return parse_json(text, path);
}
absl::Status not_measured(const std::string& path, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(
      path, ": ", what, "; give what `tapeline bench --stages --json` prints"));
}

absl::StatusOr<std::vector<StageCosts>> stage_costs_of(
    const Json& json, const std::string& path) {
  const auto wrong = [&](const std::string& what) {
    return not_measured(path, what);
  };
  const Json* stages = json.find("stages");
  if (stages == nullptr || !stages->is_array()) {
    return wrong("it has no array 'stages'");
  }
  std::vector<StageCosts> out;
  for (const Json& stage : stages->array()) {
    std::optional<double> value[4];
    for (size_t i = 0; i < 4; ++i) {
      const Json* found = stage.find(std::string_view("FIWB").substr(i, 1));
      if (found == nullptr) continue;
      if (!found->is_number() || found->number() < 0 ||
          found->number() > kMostCost) {
        return wrong(absl::StrCat("stage ", out.size(), " has a cost of ",
                                  found->dump()));
      }
      value[i] = found->number();
    }
    if (!value[0] || !value[1] || !value[2]) {
      return wrong(absl::StrCat("stage ", out.size(), " lacks F, I or W"));
    }
    out.push_back({.forward = *value[0],
                   .input = *value[1],
                   .weight = *value[2],
                   .backward = value[3]});
  }
  return out;
}

// How much busier than need be the busiest rank may be for evener stages. A
// simulation chooses between them.
constexpr double kSlacks[] = {0, 0.01, 0.02, 0.05};

bool splits_backward(const Schedule& s) {
  for (const std::vector<Action>& actions : s.ranks) {
    for (const Action& a : actions) {
      for (const Pass& p : a.passes()) {
        if (p.kind == PassKind::kInput) return true;
      }
    }
  }
  return false;
}

std::vector<StageCosts> joined(const std::vector<StageCosts>& parts,
                               const std::vector<size_t>& ends) {
  std::vector<StageCosts> out;
  size_t at = 0;
  for (const size_t end : ends) {
    StageCosts stage{.forward = 0, .input = 0, .weight = 0, .backward = 0};
    for (; at < end; ++at) {
      stage.forward += parts[at].forward;
      stage.input += parts[at].input;
      stage.weight += parts[at].weight;
      *stage.backward += parts[at].whole_backward();
    }
    out.push_back(stage);
  }
  return out;
}

// Where the parts have to be cut for this layout, if they can be.
std::optional<std::vector<size_t>> ends_of(const Layout& layout,
                                           const Layout& parts) {
  std::vector<size_t> ends;
  size_t at = 0;
  int layers = 0, depths = 0;
  for (size_t k = 0; k < layout.size(); ++k) {
    layers += layout[k].layers;
    depths += layout[k].depths;
    const bool last = k + 1 == layout.size();
    while (at < parts.size() &&
           (last || (!parts[at].head &&
                     parts[at].first_layer + parts[at].layers <= layers &&
                     parts[at].first_depth + parts[at].depths <= depths))) {
      ++at;
    }
    ends.push_back(at);
  }
  if (joined(parts, ends) != layout) return std::nullopt;
  return ends;
}

}  // namespace

absl::StatusOr<std::vector<StageCosts>> read_stage_costs(
    const std::string& path) {
  ASSIGN_OR_RETURN(const Json json, read_measured(path));
  return stage_costs_of(json, path);
}

absl::StatusOr<MeasuredParts> read_parts(const std::string& path) {
  ASSIGN_OR_RETURN(const Json json, read_measured(path));
  MeasuredParts out;
  ASSIGN_OR_RETURN(out.costs, stage_costs_of(json, path));
  const Json* layout = json.find("layout");
  if (layout == nullptr || !layout->is_string()) {
    return not_measured(path, "it has no text 'layout'");
  }
  ASSIGN_OR_RETURN(
      out.layout, parse_layout(layout->string(), absl::StrCat(path, ": layout"),
                               {.depths_share_a_layer = false}));
  if (out.layout.size() != out.costs.size()) {
    return not_measured(
        path, absl::StrCat("its layout has ", out.layout.size(),
                           " stages, its array 'stages' ", out.costs.size()));
  }
  if (out.layout.size() > kMostBalancedParts) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": more than ", kMostBalancedParts,
                     " stages; measure some layers together"));
  }
  return out;
}

absl::StatusOr<Balance> balance(const MeasuredParts& parts, const Schedule& s,
                                double latency, OvRelease ov_release) {
  if (s.placement.size() > kMostBalancedStages) {
    return absl::InvalidArgumentError(
        absl::StrCat("--balance cuts into at most ", kMostBalancedStages,
                     " stages; the schedule has ", s.stages()));
  }
  const bool splits = splits_backward(s);
  std::vector<double> times;
  for (const StageCosts& c : parts.costs) {
    times.push_back(c.forward +
                    (splits ? c.input + c.weight : c.whole_backward()));
  }
  const auto timed =
      [&](const std::vector<size_t>& ends) -> absl::StatusOr<TimedLayout> {
    TimedLayout out{.layout = joined(parts.layout, ends),
                    .costs = joined(parts.costs, ends),
                    .busiest = busiest_rank(times, s.placement, ends),
                    .simulation = {}};
    ASSIGN_OR_RETURN(out.simulation,
                     simulate(s, {out.costs, latency, ov_release}));
    return out;
  };
  Balance out;
  const auto take_if_faster = [&](const TimedLayout& t) {
    if (out.best.layout.empty() ||
        t.simulation.makespan < out.best.simulation.makespan) {
      out.best = t;
    }
  };
  for (const double slack : kSlacks) {
    const BalancedCut cut = balanced_cut(times, s.placement, slack);
    if (slack == 0) {
      out.least = cut.least;
      out.proven = cut.proven;
    }
    ASSIGN_OR_RETURN(const TimedLayout t, timed(cut.cut.ends));
    take_if_faster(t);
  }
  int layers = 0, depths = 0;
  for (const StageParts& part : parts.layout) {
    layers += part.layers;
    depths += part.depths;
  }
  if (const auto ends =
          ends_of(even_layout(layers, depths, s.stages()), parts.layout)) {
    ASSIGN_OR_RETURN(out.even, timed(*ends));
    take_if_faster(*out.even);
  }
  return out;
}

}  // namespace tapeline
