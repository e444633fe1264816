#include "tools/train/plan.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/status.h"
#include "tools/train/open_device.h"
#include "tools/train/run_options.h"

namespace tapeline {
namespace {

HostBatch batch_of(int64_t tokens) {
  HostBatch batch;
  batch.ids.assign(static_cast<size_t>(tokens), 0);
  batch.labels.assign(static_cast<size_t>(tokens), 0);
  batch.cu_seqlens = {0, static_cast<int32_t>(tokens)};
  return batch;
}

struct DryRun {
  MemoryProfile profile;
  int64_t offload = 0, pinned = 0;
};

// The second step: gradients exist from then on.
DryRun dry_run(LanguageModel& model, const TrainerOptions& options,
               int64_t tokens) {
  Trainer trainer(model, options,
                  [&](int64_t, int64_t) { return batch_of(tokens); });
  Device& device = Device::current();
  trainer.step(/*hash=*/false);
  MemoryLog log(device);
  const StepRecord record = trainer.step(/*hash=*/false);
  return {log.take(), record.offload_bytes, record.pinned_bytes};
}

std::string mib(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%10.2f",
                static_cast<double>(bytes) / (1 << 20));
  return text;
}

std::string padded(std::string text, size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

int64_t at(const std::map<std::string, int64_t>& bytes,
           const std::string& name) {
  const auto found = bytes.find(name);
  return found == bytes.end() ? 0 : found->second;
}

int64_t tag(const MemoryProfile& profile, Tag tag) {
  return profile.by_tag[static_cast<size_t>(tag)];
}

}  // namespace

RunPlan plan_training(LanguageModel& model, const TrainerOptions& options,
                      int64_t tokens, DType dtype) {
  RunPlan plan;
  plan.tokens = tokens;
  plan.micro_batches = options.micro_batches;
  CHECK(Device::current().dry()) << "a plan is made on a dry device";
  initialize(model.named_tensors(), dtype, 0, 0);
  model.apply_training_choices();
  const OffloadChoice& offload = options.offload;
  if (offload.activations || offload.ids) {
    plan.windows = plan_windows(model.layer_calls(tokens), offload);
  }
  TrainerOptions plain = options;
  plain.recompute.clear();
  plain.keep.clear();
  plain.drop_norms = false;
  const MemoryProfile all = dry_run(model, plain, tokens).profile;
  DryRun run = dry_run(model, options, tokens);
  plan.offload = run.offload;
  plan.pinned = run.pinned;
  plan.step = std::move(run.profile);
  plan.parameters = tag(plan.step, Tag::kParameter);
  plan.gradients = tag(plan.step, Tag::kGradient);
  plan.optimizer = tag(plan.step, Tag::kOptimizer);
  const int decoders = model.mtp_layer(0);
  for (int i = 0; i < decoders + model.mtp_depths(); ++i) {
    LayerMemory layer;
    layer.name = i < decoders ? absl::StrCat("layers.", i)
                              : absl::StrCat("mtp.", i - decoders);
    const auto reports =
        static_cast<size_t>(i < decoders ? i : model.mtp_layer(i - decoders));
    const bool recompute =
        reports < options.recompute.size() && options.recompute[reports];
    layer.policy = !recompute             ? "save"
                   : options.keep.empty() ? "recompute"
                                          : "keep";
    layer.kept = at(plan.step.kept, layer.name);
    layer.recomputed =
        std::max<int64_t>(0, at(all.kept, layer.name) - layer.kept);
    for (const PlannedWindow& window : plan.windows) {
      if (window.layer == i && window.copied) layer.offloaded = window.bytes;
    }
    plan.layers.push_back(std::move(layer));
  }
  return plan;
}

absl::StatusOr<RunPlan> plan_run(const Config& config,
                                 const std::string& model_path) {
  Device device(1, {}, /*dry=*/true, {.kind = device_kind(config.device)});
  const DeviceScope scope(device);
  device.pinned().set_cap(config.offload.pinned_cap_mib << 20);
  ASSIGN_OR_RETURN(const Json json, model_config(config, model_path));
  ASSIGN_OR_RETURN(const std::unique_ptr<LanguageModel> model,
                   make_language_model(json, model_choices(config)));
  TrainerOptions options = trainer_options(config);
  ASSIGN_OR_RETURN(options.recompute,
                   recomputed_layers(config, model->layers()));
  options.anomaly = false;
  RunPlan plan = plan_training(*model, options, config.train.seq_len,
                               compute_dtype(config));
  plan.model_type = json.find("model_type")->string();
  return plan;
}

Json to_json(const RunPlan& plan) {
  Json json;
  json["schema"] = 1;
  json["model_type"] = plan.model_type;
  json["tokens"] = plan.tokens;
  json["micro_batches"] = plan.micro_batches;
  Json::Array layers, windows, timeline;
  for (const LayerMemory& l : plan.layers) {
    Json row;
    row["layer"] = l.name;
    row["policy"] = l.policy;
    row["kept_bytes"] = l.kept;
    row["recomputed_bytes"] = l.recomputed;
    row["offloaded_bytes"] = l.offloaded;
    layers.push_back(std::move(row));
  }
  json["layers"] = std::move(layers);
  for (size_t i = 0; i < plan.windows.size(); ++i) {
    const PlannedWindow& w = plan.windows[i];
    Json row;
    row["index"] = static_cast<int64_t>(i);
    row["layer"] = static_cast<int64_t>(w.layer);
    row["predecessor"] = static_cast<int64_t>(w.predecessor);
    row["activations"] = w.activations;
    row["ids"] = w.ids;
    row["bytes"] = w.bytes;
    row["copied"] = w.copied;
    windows.push_back(std::move(row));
  }
  json["windows"] = std::move(windows);
  json["offload_bytes"] = plan.offload;
  json["pinned_bytes"] = plan.pinned;
  json["replays"] = plan.step.replays;
  json["parameter_bytes"] = plan.parameters;
  json["gradient_bytes"] = plan.gradients;
  json["optimizer_bytes"] = plan.optimizer;
  json["head_bytes"] = plan.step.head_peak;
  json["peak_bytes"] = plan.step.peak;
  json["peak_at"] = to_json(plan.step.peak_at);
  for (const MemoryPart& part : plan.step.timeline) {
    timeline.push_back(to_json(part));
  }
  json["timeline"] = std::move(timeline);
  return json;
}

std::string to_text(const RunPlan& plan) {
  std::string out = absl::StrCat(
      plan.model_type, ", ", plan.micro_batches, " micro-batches of ",
      plan.tokens, " tokens; MiB\n\n", padded("layer", 14),
      padded("policy", 12), "      kept recomputed  offloaded\n");
  for (const LayerMemory& l : plan.layers) {
    absl::StrAppend(&out, padded(l.name, 14), padded(l.policy, 12), mib(l.kept),
                    " ", mib(l.recomputed), " ", mib(l.offloaded), "\n");
  }
  absl::StrAppend(&out, "\n", padded("parameters", 26), mib(plan.parameters),
                  "\n", padded("gradients", 26), mib(plan.gradients), "\n",
                  padded("optimizer", 26), mib(plan.optimizer), "\n",
                  padded("heads, at most", 26), mib(plan.step.head_peak), "\n",
                  padded("pinned host memory", 26), mib(plan.pinned), "\n");
  const int64_t listed = planned_bytes(plan.windows) * plan.micro_batches;
  if (listed > plan.offload) {
    absl::StrAppend(&out, padded("beyond its cap, a step", 26),
                    mib(listed - plan.offload), "  stay on the device\n");
  }
  absl::StrAppend(
      &out, padded("peak of the pool", 26), mib(plan.step.peak), "  in ",
      plan.step.peak_at.pass.empty() ? "the step" : plan.step.peak_at.pass, " ",
      plan.step.peak_at.layer,
      "\n\ntimeline, live bytes: ", "start, peak, end\n");
  for (const MemoryPart& p : plan.step.timeline) {
    absl::StrAppend(&out, padded(p.pass.empty() ? "-" : p.pass, 10),
                    padded(p.layer.empty() ? "-" : p.layer, 12), mib(p.start),
                    " ", mib(p.peak), " ", mib(p.end), "\n");
  }
  return out;
}

}  // namespace tapeline
