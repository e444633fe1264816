// tapeline schedule: make, check, time and draw a pipeline schedule.

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <functional>
#include <iostream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "dist/pipeline/draw.h"
#include "dist/pipeline/generators.h"
#include "dist/pipeline/layout.h"
#include "dist/pipeline/memory.h"
#include "dist/pipeline/operations.h"
#include "dist/pipeline/simulator.h"
#include "dist/pipeline/text.h"
#include "dist/pipeline/validator.h"
#include "runtime/edit_distance.h"
#include "runtime/file.h"
#include "runtime/status.h"
#include "tools/tapeline/schedule_balance.h"
#include "tools/tapeline/verbs.h"

namespace tapeline {
namespace {

constexpr int64_t kNotGiven = std::numeric_limits<int64_t>::min();

struct ScheduleFlags {
  std::string name, file, validate, cost, stage_cost, layout, part_cost;
  std::string balance;
  std::string svg, csv;
  std::string ov_release = "end";
  ScheduleSize size{.ranks = kNotGiven,
                    .chunks = kNotGiven,
                    .micro_batches = kNotGiven,
                    .group = kNotGiven};
  double latency = 0, max_activations = 0;
  bool json = false;
};

Flags make_flags(ScheduleFlags& f) {
  Flags flags("schedule");
  flags.add(
      "name", &f.name, "N",
      absl::StrCat("which to make: ", absl::StrJoin(schedule_names(), " ")));
  flags.add("ranks", &f.size.ranks, "P", "pipeline ranks");
  flags.add("chunks", &f.size.chunks, "V", "stages a rank (1; 2 for V shapes)");
  flags.add("micro_batches", &f.size.micro_batches, "M", "in a step");
  flags.add("group", &f.size.group, "G",
            "interleaved, zb1p: micro-batches that pass together (ranks)");
  flags.add("file", &f.file, "F", "read a schedule, text or torch's CSV");
  flags.add("validate", &f.validate, "F", "only say whether it can run");
  flags.add("cost", &f.cost, "F=1,I=1,W=1",
            "of an action of one stage; also B (I + W) and OV (F + B)");
  flags.add("stage_cost", &f.stage_cost, "JSON",
            "instead: of each stage, as `tapeline bench --stages --json` "
            "prints it");
  flags.add("balance", &f.balance, "JSON",
            "instead: cut the model into stages, given the times of its parts "
            "as `tapeline bench --stages --json` prints them");
  flags.add("latency", &f.latency, "C", "of a message between ranks (0)");
  flags.add("ov_release", &f.ov_release, "end|early",
            "when the halves of OV give their results (end)");
  flags.add("max_activations", &f.max_activations, "X",
            "refuse ranks that keep more, in micro-batches (no limit)");
  flags.add("layout", &f.layout, "S",
            "parts of the model by stage, as Et*3|(tt|)*6mL");
  flags.add("part_cost", &f.part_cost, "E=0,t=1,m=1,L=0",
            "with --layout: --cost is of one layer, a part so many layers");
  flags.add("svg", &f.svg, "OUT", "draw the timeline");
  flags.add("csv", &f.csv, "OUT", "write torch's compute-only CSV");
  flags.add("json", &f.json, "", "print figures and actions as JSON");
  return flags;
}

std::string check(const ScheduleFlags& f) {
  const int sources = static_cast<int>(!f.name.empty()) +
                      static_cast<int>(!f.file.empty()) +
                      static_cast<int>(!f.validate.empty());
  if (sources != 1) return "give one of --name, --file and --validate";
  if (const auto& names = schedule_names();
      !f.name.empty() &&
      std::find(names.begin(), names.end(), f.name) == names.end()) {
    return absl::StrCat("--name is '", f.name, "'", suggestion(f.name, names),
                        "; use one of ", absl::StrJoin(names, " "));
  }
  const ScheduleSize& size = f.size;
  const auto given = [](int64_t value) { return value != kNotGiven; };
  if (f.name.empty() && (given(size.ranks) || given(size.chunks) ||
                         given(size.micro_batches) || given(size.group))) {
    return "--ranks, --chunks, --micro_batches and --group go with --name";
  }
  if (!f.name.empty() && size.ranks < 1) return "--ranks must be at least 1";
  if (!f.name.empty() && size.micro_batches < 1) {
    return "--micro_batches must be at least 1";
  }
  if (given(size.chunks) && size.chunks < 1) {
    return "--chunks must be at least 1";
  }
  if (given(size.group) && size.group < 1) return "--group must be at least 1";
  if (f.latency < 0 || f.latency > kMostCost) {
    return "--latency must be from 0 to 1e15";
  }
  if (f.max_activations < 0) return "--max_activations must not be negative";
  if (!f.part_cost.empty() && f.layout.empty()) {
    return "--part_cost goes with --layout";
  }
  if (!f.stage_cost.empty() && !(f.cost.empty() && f.layout.empty())) {
    return "--stage_cost goes with neither --cost nor --layout";
  }
  if (!f.balance.empty() &&
      !(f.cost.empty() && f.layout.empty() && f.stage_cost.empty())) {
    return "--balance goes with none of --cost, --layout and --stage_cost";
  }
  if (!f.balance.empty() && !f.validate.empty()) {
    return "--balance goes with --name or --file";
  }
  if (f.ov_release != "end" && f.ov_release != "early") {
    return absl::StrCat("--ov_release is '", f.ov_release,
                        "'; use end or early");
  }
  return "";
}

// "F=1,I=1.5": what is not given stays. `set` says whether it knows the key.
absl::Status parse_numbers(
    const std::string& flag, const std::string& text,
    const std::string& example, const std::string& known,
    const std::function<bool(const std::string& key, double value)>& set) {
  if (text.empty()) return absl::OkStatus();
  for (const absl::string_view item : absl::StrSplit(text, ',')) {
    const std::pair<std::string, std::string> pair =
        absl::StrSplit(item, absl::MaxSplits('=', 1));
    const auto& [key, number] = pair;
    double value = 0;
    const char* end = number.data() + number.size();
    const auto parsed = std::from_chars(number.data(), end, value);
    // A NaN is not within bounds either.
    if (parsed.ec != std::errc() || parsed.ptr != end ||
        !(value >= 0 && value <= kMostCost)) {
      return absl::InvalidArgumentError(
          absl::StrCat(flag, " has '", item, "'; give it as ", example));
    }
    if (!set(key, value)) {
      return absl::InvalidArgumentError(
          absl::StrCat(flag, " has '", key, "'; ", known));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<StageCosts> parse_cost(const std::string& text) {
  StageCosts costs;
  RETURN_IF_ERROR(parse_numbers("--cost", text, "F=1,I=1,W=1",
                                "actions are F, I, W, B and OV",
                                [&](const std::string& key, double value) {
                                  if (key == "F") {
                                    costs.forward = value;
                                  } else if (key == "I") {
                                    costs.input = value;
                                  } else if (key == "W") {
                                    costs.weight = value;
                                  } else if (key == "B") {
                                    costs.backward = value;
                                  } else if (key == "OV") {
                                    costs.overlapped = value;
                                  } else {
                                    return false;
                                  }
                                  return true;
                                }));
  return costs;
}

// How many layers the parts of a model are worth.
struct PartWeights {
  double embedding = 0, layer = 1, depth = 1, head = 0;
};

absl::StatusOr<PartWeights> parse_part_cost(const std::string& text) {
  PartWeights weights;
  RETURN_IF_ERROR(parse_numbers("--part_cost", text, "E=0,t=1,m=1,L=0",
                                "parts are E, t, m and L",
                                [&](const std::string& key, double value) {
                                  if (key == "E") {
                                    weights.embedding = value;
                                  } else if (key == "t") {
                                    weights.layer = value;
                                  } else if (key == "m") {
                                    weights.depth = value;
                                  } else if (key == "L") {
                                    weights.head = value;
                                  } else {
                                    return false;
                                  }
                                  return true;
                                }));
  return weights;
}

double layers_of(const StageParts& parts, const PartWeights& weights) {
  return weights.embedding * parts.embedding + weights.layer * parts.layers +
         weights.depth * parts.depths + weights.head * parts.head;
}

StageCosts scaled(StageCosts costs, double factor) {
  costs.forward *= factor;
  costs.input *= factor;
  costs.weight *= factor;
  if (costs.backward) *costs.backward *= factor;
  if (costs.overlapped) *costs.overlapped *= factor;
  return costs;
}

OvRelease release(const ScheduleFlags& f) {
  return f.ov_release == "end" ? OvRelease::kEnd : OvRelease::kEarly;
}

Limits limits(const ScheduleFlags& f, const Schedule& s) {
  Limits out{.ov_release = release(f)};
  if (f.max_activations > 0) {
    const double share = 1.0 / s.chunks();
    out.budget = {f.max_activations};
    out.holds = {{.forward = share, .parked = 0, .stash = share}};
  }
  return out;
}

// --- What is printed

struct Report {
  std::string name;
  Schedule schedule;
  StageCosts cost;  // as given
  Costs costs;
  Simulation simulation;
  std::optional<Layout> layout;
  bool stage_costs = false;  // costs.stages were given one by one
  std::optional<Balance> balance;

  // In micro-batches of a whole rank.
  std::vector<double> peak(const Holds& holds) const {
    std::vector<double> out;
    const int chunks = schedule.chunks();  // looks at every stage
    for (const Peak& peak : peaks(schedule, {holds})) {
      out.push_back(peak.value / chunks);
    }
    return out;
  }
};

template <class T>
Json array_json(const std::vector<T>& values) {
  Json::Array out;
  for (const T& value : values) out.emplace_back(value);
  return out;
}

Json actions_json(const Schedule& s) {
  Json::Array out;
  for (const std::vector<Action>& actions : s.ranks) {
    Json::Array list;
    for (const Action& a : actions) list.emplace_back(to_string(a));
    out.emplace_back(std::move(list));
  }
  return out;
}

Json layout_json(const Layout& layout) {
  Json::Array out;
  for (const StageParts& stage : layout) {
    Json item;
    item["embedding"] = stage.embedding;
    item["first_layer"] = stage.first_layer;
    item["layers"] = stage.layers;
    item["first_depth"] = stage.first_depth;
    item["depths"] = stage.depths;
    item["head"] = stage.head;
    out.push_back(std::move(item));
  }
  return out;
}

Json cost_json(const StageCosts& c) {
  Json cost;
  cost["F"] = c.forward;
  cost["I"] = c.input;
  cost["W"] = c.weight;
  cost["B"] = c.whole_backward();
  cost["OV"] = c.overlapped.value_or(c.forward + c.whole_backward());
  return cost;
}

Json balance_json(const Balance& b) {
  const auto timed = [](const TimedLayout& t) {
    Json out;
    out["layout"] = layout_text(t.layout);
    out["makespan"] = t.simulation.makespan;
    out["busiest"] = t.busiest;
    return out;
  };
  Json out = timed(b.best);
  out["least_busiest"] = b.least;
  out["proven"] = b.proven;
  out["even"] = b.even ? timed(*b.even) : Json();
  return out;
}

Json to_json(const Report& r) {
  const Schedule& s = r.schedule;
  Json out;
  out["schema"] = 1;
  out["name"] = r.name;
  out["ranks"] = s.ranks.size();
  out["chunks"] = s.chunks();
  out["micro_batches"] = s.micro_batches;
  out["placement"] = array_json(s.placement);
  if (r.stage_costs) {
    Json::Array costs;
    for (const StageCosts& of : r.costs.stages) costs.push_back(cost_json(of));
    out["stage_cost"] = std::move(costs);
  } else {
    out["cost"] = cost_json(r.cost);
  }
  out["latency"] = r.costs.latency;
  out["ov_release"] = r.costs.ov_release == OvRelease::kEnd ? "end" : "early";
  out["makespan"] = r.simulation.makespan;
  out["busy"] = array_json(r.simulation.busy);
  out["idle"] = array_json(r.simulation.idle);
  out["idle_inside"] = array_json(r.simulation.idle_inside);
  out["bubble"] = r.simulation.bubble;
  out["peak_activations"] = array_json(r.peak({}));
  out["peak_activations_at_i"] = array_json(r.peak({.stash = 0}));
  out["peak_w_stash"] = array_json(r.peak({.forward = 0}));
  out["messages_sent"] = array_json(messages_sent(s));
  const std::optional<int> capacity = min_capacity(s, r.costs.ov_release);
  out["min_capacity"] = capacity ? Json(*capacity) : Json();
  out["slots"] = array_json(r.simulation.slots);
  if (r.layout) {
    out["layout"] = layout_json(*r.layout);
    Json::Array forward;
    for (const StageCosts& of : r.costs.stages) forward.push_back(of.forward);
    out["stage_forward"] = std::move(forward);
  }
  if (r.balance) out["balance"] = balance_json(*r.balance);
  out["actions"] = actions_json(s);
  return out;
}

// A file that --file reads, with the figures as comments.
void print(const Report& r) {
  const Simulation& sim = r.simulation;
  std::cout << "# " << r.name << ": makespan " << sim.makespan << ", bubble "
            << sim.bubble << "\n"
            << "# idle by rank: " << absl::StrJoin(sim.idle, " ") << "\n"
            << "# most activations by rank: " << absl::StrJoin(r.peak({}), " ")
            << "\n";
  if (r.layout) std::cout << "# layout " << layout_text(*r.layout) << "\n";
  if (r.balance) {
    const auto line = [](const char* what, const TimedLayout& t) {
      std::cout << "# " << what << " " << layout_text(t.layout) << ": makespan "
                << t.simulation.makespan << ", busiest rank " << t.busiest
                << " a micro-batch";
    };
    line("balanced", r.balance->best);
    std::cout << " (least " << (r.balance->proven ? "" : "found ")
              << r.balance->least << ")\n";
    if (r.balance->even) {
      line("even", *r.balance->even);
      std::cout << "\n";
    }
  }
  const std::string timeline = ascii_timeline(r.schedule, sim);
  for (const absl::string_view line :
       absl::StrSplit(timeline, '\n', absl::SkipEmpty())) {
    std::cout << "# " << line << "\n";
  }
  std::cout << schedule_text(r.schedule);
}

// --- What is done

// A file that is no schedule is not valid either, but no action is guilty.
int unreadable(const ScheduleFlags& f, const absl::Status& status) {
  if (f.json) {
    Json out;
    out["schema"] = 1;
    out["valid"] = false;
    for (const char* key : {"check", "rank", "index", "action"}) out[key] = {};
    out["message"] = std::string(status.message());
    std::cout << out.dump() << "\n";
  }
  return fail(kExitBadInput, status);
}

int validate_file(const ScheduleFlags& f) {
  const absl::StatusOr<Schedule> s = read_schedule(user_path(f.validate));
  if (!s.ok()) return unreadable(f, s.status());
  const std::optional<Refusal> refusal = validate(*s, limits(f, *s));
  std::optional<Refusal> in_training;
  if (!refusal) in_training = check_order_of_sums(*s);
  if (f.json) {
    Json out;
    out["schema"] = 1;
    out["valid"] = !refusal;
    if (refusal) {
      out["check"] = name_of(refusal->check);
      out["rank"] = refusal->rank;
      out["index"] = refusal->index;
      out["action"] = refusal->action;
      out["message"] = refusal->message;
    }
    if (in_training) out["refused_in_training"] = to_string(*in_training);
    std::cout << out.dump() << "\n";
  } else if (!refusal) {
    std::cout << "valid";
    if (in_training) {
      std::cout << "; but training refuses it: " << to_string(*in_training);
    }
    std::cout << "\n";
  }
  const int written = end_output();
  if (written != kExitDone || !refusal) return written;
  return fail(kExitBadInput,
              absl::StrCat(f.validate, ": ", to_string(*refusal)));
}

absl::StatusOr<Schedule> make_or_read(const ScheduleFlags& f) {
  if (!f.file.empty()) return read_schedule(user_path(f.file));
  ScheduleSize size = f.size;
  if (size.chunks == kNotGiven) size.chunks = default_chunks(f.name);
  if (size.group == kNotGiven) size.group = 0;
  return make_schedule(f.name, size);
}

absl::StatusOr<Report> make_report(const ScheduleFlags& f,
                                   const StageCosts& cost,
                                   const PartWeights& weights) {
  Report r{.name = f.name.empty() ? f.file : f.name, .cost = cost};
  r.costs = {{cost}, f.latency, release(f)};
  ASSIGN_OR_RETURN(r.schedule, make_or_read(f));
  if (const auto refusal = validate(r.schedule, limits(f, r.schedule))) {
    return absl::InvalidArgumentError(
        absl::StrCat(r.name, ": ", to_string(*refusal)));
  }
  if (!f.layout.empty()) {
    ASSIGN_OR_RETURN(r.layout, parse_layout(f.layout, "--layout"));
    if (r.layout->size() != r.schedule.placement.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--layout has ", r.layout->size(),
                       " stages; the schedule has ", r.schedule.stages()));
    }
    r.costs.stages.clear();
    for (const StageParts& parts : *r.layout) {
      r.costs.stages.push_back(scaled(cost, layers_of(parts, weights)));
    }
  }
  if (!f.balance.empty()) {
    ASSIGN_OR_RETURN(const MeasuredParts parts, read_parts(f.balance));
    ASSIGN_OR_RETURN(r.balance,
                     balance(parts, r.schedule, f.latency, release(f)));
    r.layout = r.balance->best.layout;
    r.costs.stages = r.balance->best.costs;
    r.simulation = r.balance->best.simulation;
    r.stage_costs = true;
    return r;
  }
  if (!f.stage_cost.empty()) {
    ASSIGN_OR_RETURN(r.costs.stages, read_stage_costs(f.stage_cost));
    if (static_cast<int>(r.costs.stages.size()) != r.schedule.stages()) {
      return absl::InvalidArgumentError(
          absl::StrCat(f.stage_cost, " has ", r.costs.stages.size(),
                       " stages; the schedule has ", r.schedule.stages()));
    }
    r.stage_costs = true;
  }
  ASSIGN_OR_RETURN(r.simulation, simulate(r.schedule, r.costs));
  return r;
}

absl::Status write_files(const ScheduleFlags& f, const Report& r) {
  if (!f.svg.empty()) {
    RETURN_IF_ERROR(write_file_atomic(user_path(f.svg),
                                      svg_timeline(r.schedule, r.simulation)));
  }
  if (!f.csv.empty()) {
    RETURN_IF_ERROR(
        write_file_atomic(user_path(f.csv), schedule_csv(r.schedule)));
  }
  return absl::OkStatus();
}

}  // namespace

int schedule_verb(const Arguments& arguments) {
  ScheduleFlags f;
  Flags flags = make_flags(f);
  const absl::StatusOr<bool> parsed = parse_or_help(flags, arguments);
  if (!parsed.ok()) return fail(kExitUsage, parsed.status());
  if (!*parsed) return end_output();
  if (const std::string wrong = check(f); !wrong.empty()) {
    return fail(kExitUsage, wrong);
  }
  const absl::StatusOr<StageCosts> cost = parse_cost(f.cost);
  if (!cost.ok()) return fail(kExitUsage, cost.status());
  const absl::StatusOr<PartWeights> weights = parse_part_cost(f.part_cost);
  if (!weights.ok()) return fail(kExitUsage, weights.status());
  if (!f.validate.empty()) return validate_file(f);
  const absl::StatusOr<Report> report = make_report(f, *cost, *weights);
  if (!report.ok()) return fail(kExitBadInput, report.status());
  const absl::Status written = write_files(f, *report);
  if (!written.ok()) return fail(kExitDisk, written);
  if (f.json) {
    std::cout << to_json(*report).dump() << "\n";
  } else {
    print(*report);
  }
  return end_output();
}

}  // namespace tapeline
