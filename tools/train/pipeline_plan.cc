#include "tools/train/pipeline_plan.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dist/gradient_reducer.h"
#include "dist/pipeline/generators.h"
#include "dist/pipeline/text.h"
#include "dist/pipeline/validator.h"
#include "runtime/check.h"
#include "runtime/edit_distance.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

int64_t chunks_of(const Config& c) {
  return c.pipeline.chunks == 0 ? default_chunks(c.pipeline.schedule)
                                : c.pipeline.chunks;
}

std::string processes_text(int n) {
  return absl::StrCat(n, n == 1 ? " process" : " processes");
}

absl::StatusOr<MeshPoint> make_mesh(const Config& c, int processes) {
  const int64_t pp = c.pipeline.ranks == 0 ? processes : c.pipeline.ranks;
  if (pp > processes) {
    return absl::InvalidArgumentError(
        absl::StrCat("pipeline.ranks is ", pp, ", but there is only ",
                     processes_text(processes), "; start with --nproc ", pp,
                     ", or with torchrun, srun or mpirun"));
  }
  if (processes % pp != 0) {
    return absl::InvalidArgumentError(absl::StrCat("pipeline.ranks is ", pp,
                                                   ", which does not divide ",
                                                   processes_text(processes)));
  }
  MeshPoint mesh;
  mesh.pp = static_cast<int>(pp);
  mesh.dp = processes / mesh.pp;
  RETURN_IF_ERROR(check_mesh(mesh, processes));
  if (c.train.micro_batches % mesh.dp != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "train.micro_batches is ", c.train.micro_batches,
        ", which is not the same for each of ", mesh.dp, " replicas (",
        processes_text(processes), ", pipeline.ranks ", mesh.pp, ")"));
  }
  return mesh;
}

absl::StatusOr<Schedule> make_or_read(const Config& c, int ranks,
                                      int64_t micro_batches,
                                      const std::string& file) {
  if (file.empty()) {
    absl::StatusOr<Schedule> made =
        make_schedule(c.pipeline.schedule, {.ranks = ranks,
                                            .chunks = chunks_of(c),
                                            .micro_batches = micro_batches});
    if (made.ok()) return made;
    return absl::Status(
        made.status().code(),
        absl::StrCat("pipeline.schedule = ", c.pipeline.schedule, ": ",
                     made.status().message()));
  }
  ASSIGN_OR_RETURN(Schedule s, read_schedule(file));
  auto refusal = validate(s);
  // What a name makes ascends; a file may say anything.
  if (!refusal) refusal = check_order_of_sums(s);
  if (refusal) {
    return absl::InvalidArgumentError(
        absl::StrCat(file, ": ", to_string(*refusal)));
  }
  if (static_cast<int>(s.ranks.size()) != ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat(file, " is for ", s.ranks.size(), " ranks, but there are ",
                     ranks, " pipeline ranks"));
  }
  if (s.micro_batches != micro_batches) {
    return absl::InvalidArgumentError(absl::StrCat(
        file, " is for ", s.micro_batches, " micro-batches, but a replica has ",
        micro_batches, "; change train.micro_batches or the file"));
  }
  return s;
}

absl::StatusOr<Layout> make_layout(const Config& c, const LanguageModel& model,
                                   int stages) {
  const int layers = model.decoder_layers(), depths = model.mtp_depths();
  if (c.pipeline.layout.empty()) return even_layout(layers, depths, stages);
  const LayoutRules rules = {
      .depths_share_a_layer =
          depths > 1 && model.mtp_layer(0) == model.mtp_layer(1),
      .layers = layers,
      .depths = depths};
  ASSIGN_OR_RETURN(Layout layout,
                   parse_layout(c.pipeline.layout, "pipeline.layout", rules));
  if (static_cast<int>(layout.size()) != stages) {
    return absl::InvalidArgumentError(
        absl::StrCat("pipeline.layout has ", layout.size(),
                     " stages, but the schedule has ", stages));
  }
  return layout;
}

// The model decides who shares; a file may say it too.
absl::Status set_groups(Schedule& s, const SharedWeights& shared,
                        const std::string& file) {
  std::vector<ReplicaGroup> groups;
  if (shared.stages.size() > 1) groups = {{"embedding", shared.stages}};
  const bool differs =
      s.groups.size() > 1 ||
      (s.groups.size() == 1 &&
       (groups.empty() || s.groups[0].stages != groups[0].stages));
  if (differs) {
    return absl::InvalidArgumentError(absl::StrCat(
        file, " says that stages share weights, but with this model and layout",
        groups.empty() ? " none do" : " others do",
        "; leave its group lines out"));
  }
  s.groups = std::move(groups);
  return absl::OkStatus();
}

}  // namespace

absl::Status check_pipeline_settings(const Config& c) {
  const std::vector<std::string>& names = schedule_names();
  const std::string& name = c.pipeline.schedule;
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "pipeline.schedule is '", name, "'", suggestion(name, names),
        "; use one of ", absl::StrJoin(names, " ")));
  }
  const PipelineSettings defaults;
  const char* other = name != defaults.schedule              ? "schedule"
                      : c.pipeline.chunks != defaults.chunks ? "chunks"
                                                             : nullptr;
  if (!c.pipeline.file.empty() && other != nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("pipeline.file and pipeline.", other,
                     " both say what a rank runs; leave one of them out"));
  }
  return absl::OkStatus();
}

bool is_plain(const Config& c, int processes) {
  return processes == 1 && c.pipeline.ranks <= 1 && chunks_of(c) == 1 &&
         c.pipeline.layout.empty() && c.pipeline.file.empty();
}

absl::StatusOr<PipelinePlan> plan_pipeline(const Config& c,
                                           LanguageModel& model, int processes,
                                           const std::string& file) {
  RETURN_IF_ERROR(check_pipeline_settings(c));
  PipelinePlan plan;
  ASSIGN_OR_RETURN(plan.mesh, make_mesh(c, processes));
  plan.name = file.empty() ? c.pipeline.schedule : file;
  ASSIGN_OR_RETURN(plan.schedule,
                   make_or_read(c, plan.mesh.pp,
                                c.train.micro_batches / plan.mesh.dp, file));
  ASSIGN_OR_RETURN(plan.layout, make_layout(c, model, plan.stages()));
  plan.shared = model.shared_embedding(plan.layout);
  RETURN_IF_ERROR(set_groups(plan.schedule, plan.shared, file));
  // Groups are new to the proof.
  if (const auto refusal = validate(plan.schedule)) return to_status(*refusal);
  ASSIGN_OR_RETURN(plan.programs, lower(plan.schedule));
  for (int stage = 0; stage < plan.stages(); ++stage) {
    for (const NamedTensor& t : model.stage_tensors(plan.layout, stage)) {
      plan.owner.emplace(t.name, plan.schedule.placement[stage]);
    }
  }
  for (const NamedTensor& t : model.named_tensors()) {
    CHECK(plan.owner.contains(t.name))
        << "[pipeline] " << t.name << " is no stage's";
  }
  return plan;
}

std::vector<NcclRoute> routes_of(const PipelinePlan& plan) {
  std::vector<NcclRoute> out;
  const std::vector<int>& placement = plan.schedule.placement;
  const auto at = [&](int stage_rank, int replica) {
    MeshPoint place = {
        .pp = stage_rank, .dp = replica, .ep = 0, .sp = 0, .tp = 0};
    return rank_of(plan.mesh, place);
  };
  const auto both_ways = [&](int a, int b, int channel) {
    out.push_back({a, b, channel});
    out.push_back({b, a, channel});
  };
  for (int d = 0; d < plan.mesh.dp; ++d) {
    for (int s = 0; s + 1 < plan.stages(); ++s) {
      const int here = at(placement[s], d), there = at(placement[s + 1], d);
      if (here == there) continue;
      out.push_back({here, there, channel_of({true, s})});
      out.push_back({there, here, channel_of({false, s + 1})});
    }
    for (size_t g = 0; g < plan.schedule.groups.size(); ++g) {
      std::set<int> ranks;
      for (const int s : plan.schedule.groups[g].stages) {
        ranks.insert(placement[s]);
      }
      for (const int a : ranks) {
        for (const int b : ranks) {
          if (a < b) {
            both_ways(at(a, d), at(b, d),
                      group_channel(plan.schedule, static_cast<int>(g)));
          }
        }
      }
    }
  }
  for (int r = 1; r < plan.mesh.pp; ++r) {
    out.push_back({at(r, 0), at(0, 0), kGatherChannel});
  }
  for (int r = 0; r < plan.mesh.pp; ++r) {
    for (int a = 0; a < plan.mesh.dp; ++a) {
      for (int b = a + 1; b < plan.mesh.dp; ++b) {
        for (const int channel : kReducerChannels) {
          both_ways(at(r, a), at(r, b), channel);
        }
      }
    }
  }
  return out;
}

std::vector<std::vector<int>> groups_of(const PipelinePlan& plan) {
  std::vector<std::vector<int>> out;
  for (const std::vector<Axis>& axes :
       {std::vector<Axis>{Axis::kPipeline, Axis::kData},
        std::vector<Axis>{Axis::kPipeline}, std::vector<Axis>{Axis::kData}}) {
    for (const std::vector<int>& group : groups(plan.mesh, axes)) {
      const bool fresh = std::find(out.begin(), out.end(), group) == out.end();
      // One rank has nobody to add to, but all of them must have a group.
      if (fresh && (group.size() > 1 || out.empty())) out.push_back(group);
    }
  }
  return out;
}

std::string plan_text(const PipelinePlan& plan) {
  std::string out =
      absl::StrCat(plan.name, ", ", plan.mesh.pp, " pipeline ranks");
  if (plan.mesh.dp > 1) {
    absl::StrAppend(&out, " x ", plan.mesh.dp, " replicas");
  }
  absl::StrAppend(&out, ", stages ", layout_text(plan.layout), " on ranks");
  for (const int rank : plan.schedule.placement) {
    absl::StrAppend(&out, " ", rank);
  }
  return out;
}

}  // namespace tapeline
