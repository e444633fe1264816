#include "tools/train/bench.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "autograd/gradients.h"
#include "autograd/offload.h"
#include "models/batch.h"
#include "runtime/cuda_device.h"
#include "runtime/device.h"
#include "runtime/device_timer.h"
#include "runtime/random.h"
#include "runtime/status.h"
#include "tools/train/run_options.h"
#include "tools/train/trainer.h"

namespace tapeline {
namespace {

// Sequences of random tokens, each with the next one as its label.
HostBatch random_batch(const BenchOptions& o, uint64_t seed,
                       int64_t vocabulary) {
  const Random random(seed, "bench");
  HostBatch batch;
  batch.cu_seqlens = {0};
  for (int64_t b = 0; b < o.batch; ++b) {
    for (int64_t t = 0; t < o.seq; ++t) {
      batch.ids.push_back(static_cast<int32_t>(
          random.below(static_cast<uint64_t>(vocabulary), batch.ids.size())));
      if (t > 0) batch.labels.push_back(batch.ids.back());
    }
    batch.labels.push_back(-100);
    batch.cu_seqlens.push_back(static_cast<int32_t>(batch.ids.size()));
  }
  return batch;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double gib(int64_t bytes) {
  return static_cast<double>(bytes) / static_cast<double>(int64_t{1} << 30);
}

}  // namespace

absl::StatusOr<BenchReport> bench_forward_backward(
    const Config& config, const std::string& model_path,
    const BenchOptions& o) {
  if (o.batch * o.seq > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat(o.batch, " sequences of ", o.seq,
                     " tokens are more than 2^31 - 1 tokens; lower --batch"));
  }
  if (o.trace && Device::current().kind() != DeviceKind::kCuda) {
    return absl::InvalidArgumentError(
        "--trace watches CUDA, but this runs on a CPU; set device=cuda");
  }
  ASSIGN_OR_RETURN(const Json json, model_config(config, model_path));
  ASSIGN_OR_RETURN(const std::unique_ptr<LanguageModel> model,
                   make_language_model(json, model_choices(config)));
  const auto seed = static_cast<uint64_t>(config.seed);
  const std::vector<NamedTensor> tensors = model->named_tensors();
  initialize(tensors, compute_dtype(config), seed, model->initializer_std());
  model->apply_training_choices();

  TrainerOptions options = trainer_options(config);
  ASSIGN_OR_RETURN(options.recompute,
                   recomputed_layers(config, model->layers()));
  options.micro_batches = 1;
  const HostBatch batch = random_batch(o, seed, model->vocabulary());
  const Denominators n = count_targets({batch}, model->mtp_depths());
  ParameterGradients grads;
  Device& device = Device::current();
  DeviceTimer timer;
  BenchReport report;
  const auto run = [&](bool with_offload) {
    grads.zero();
    std::unique_ptr<OffloadGraph> offload;
    if (with_offload) {
      offload = offload_graph(*model, options, o.batch * o.seq);
    }
    return run_micro_batch(*model, options, batch, n, offload.get(), grads).lm;
  };
  const auto timed = [&](bool with_offload) {
    timer.start();
    const Tensor loss = run(with_offload);
    timer.stop();
    const double ms = timer.milliseconds();
    report.loss = static_cast<double>(loss.to_vector<float>()[0]);
    return ms;
  };
  for (int64_t i = 0; i < o.warmup + o.repeats; ++i) {
    if (i == std::min<int64_t>(2, o.warmup)) device.pool().settle();
    device.pool().reset_peak();
    const double ms = timed(true);
    const int64_t peak = device.pool().stats().peak;
    const double without = o.alternate ? timed(false) : 0;
    if (i < o.warmup) continue;
    report.ms_all.push_back(ms);
    report.peak_bytes = std::max(report.peak_bytes, peak);
    if (o.alternate) report.ms_without_all.push_back(without);
  }
  const PoolStats stats = device.pool().stats();
  const auto live = [&](Tag tag) {
    return stats.live_bytes[static_cast<size_t>(tag)];
  };
  if (o.trace) {
    ASSIGN_OR_RETURN(const std::unique_ptr<CudaMonitor> monitor,
                     CudaMonitor::start());
    run(true);
    report.traced = monitor->stop();
  }
  report.device =
      device.kind() == DeviceKind::kCuda ? cuda_properties()->name : "cpu";
  report.dtype = std::string(name_of(compute_dtype(config)));
  report.batch = o.batch;
  report.seq = o.seq;
  report.ms = median(report.ms_all);
  report.tokens_per_s = 1e3 * static_cast<double>(o.batch * o.seq) / report.ms;
  report.params = parameter_count(tensors);
  report.parameter_bytes = live(Tag::kParameter);
  report.gradient_bytes = live(Tag::kGradient);
  report.reserved_bytes = stats.reserved;
  return report;
}

Json to_json(const BenchReport& r) {
  Json json;
  json["schema"] = 1;
  json["device"] = r.device;
  json["dtype"] = r.dtype;
  json["batch"] = r.batch;
  json["seq"] = r.seq;
  json["ms"] = r.ms;
  Json::Array all;
  for (double ms : r.ms_all) all.push_back(ms);
  json["ms_all"] = std::move(all);
  if (!r.ms_without_all.empty()) {
    Json::Array without;
    for (double ms : r.ms_without_all) without.push_back(ms);
    json["ms_without"] = median(r.ms_without_all);
    json["ms_without_all"] = std::move(without);
  }
  json["tokens_per_s"] = r.tokens_per_s;
  json["peak_gib"] = gib(r.peak_bytes);
  json["parameter_gib"] = gib(r.parameter_bytes);
  json["gradient_gib"] = gib(r.gradient_bytes);
  json["reserved_gib"] = gib(r.reserved_bytes);
  json["params"] = r.params;
  json["loss"] = r.loss;
  if (r.traced) json["trace"] = to_json(*r.traced);
  return json;
}

std::string to_text(const BenchReport& r) {
  char text[512];
  std::snprintf(
      text, sizeof(text),
      "%lld parameters, %s, %s; forward and backward of %lld x %lld tokens\n"
      "%.2f ms, the median of %zu from %.2f to %.2f; %.0f tokens/s\n"
      "peak %.2f GiB: weights %.2f, gradients (f32) %.2f, the rest %.2f; loss "
      "%.4f\n",
      static_cast<long long>(r.params), r.dtype.c_str(), r.device.c_str(),
      static_cast<long long>(r.batch), static_cast<long long>(r.seq), r.ms,
      r.ms_all.size(), *std::min_element(r.ms_all.begin(), r.ms_all.end()),
      *std::max_element(r.ms_all.begin(), r.ms_all.end()), r.tokens_per_s,
      gib(r.peak_bytes), gib(r.parameter_bytes), gib(r.gradient_bytes),
      gib(r.peak_bytes - r.parameter_bytes - r.gradient_bytes), r.loss);
  std::string out = text;
  if (!r.ms_without_all.empty()) {
    const double without = median(r.ms_without_all);
    std::snprintf(text, sizeof(text),
                  "without offload %.2f ms: it costs %.2f %%\n", without,
                  100 * (r.ms / without - 1));
    out += text;
  }
  if (!r.traced) return out;
  for (const CudaTotal& total : largest(*r.traced, 10)) {
    std::snprintf(text, sizeof(text), "%12.1f us %6lld x %.400s\n", total.us,
                  static_cast<long long>(total.calls), total.name.c_str());
    out += text;
  }
  return out;
}

}  // namespace tapeline
