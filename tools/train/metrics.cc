#include "tools/train/metrics.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "absl/strings/str_cat.h"
#include "runtime/file.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

std::string format(const char* pattern, double value) {
  char text[64];
  std::snprintf(text, sizeof(text), pattern, value);
  return text;
}

// 532 tok/s, 41.2k tok/s.
std::string rate(double per_second) {
  if (per_second < 10000) return format("%5.0f tok/s", per_second);
  return format("%4.1fk tok/s", per_second / 1000);
}

std::string clock_time(double seconds) {
  const auto s = static_cast<int64_t>(std::max(0.0, seconds) + 0.5);
  char text[32];
  std::snprintf(text, sizeof(text), "%02lld:%02lld:%02lld",
                static_cast<long long>(s / 3600),
                static_cast<long long>(s / 60 % 60),
                static_cast<long long>(s % 60));
  return text;
}

}  // namespace

Json to_json(const StepRecord& r) {
  Json json;
  json["step"] = r.step;
  json["time_unix"] = r.time_unix;
  json["loss"] = r.loss;
  json["lm_loss"] = r.lm_loss;
  json["mtp_loss"] = r.mtp_loss;
  json["balance_loss"] = r.balance_loss;
  json["z_loss"] = r.z_loss;
  json["indexer_loss"] = r.indexer_loss;
  json["lr"] = r.lr;
  json["grad_norm"] = r.grad_norm;
  json["tokens"] = r.tokens;
  json["tokens_per_s"] = r.tokens_per_s;
  json["step_ms"] = r.step_ms;
  json["pool_peak_bytes"] = r.pool_peak_bytes;
  json["pinned_bytes"] = r.pinned_bytes;
  json["offload_bytes"] = r.offload_bytes;
  json["offload_exposed_ms"] = r.offload_exposed_ms;
  json["replays"] = r.replays;
  json["rss_peak_bytes"] = r.rss_peak_bytes;
  const auto or_null = [](const std::optional<double>& x) {
    return x ? Json(*x) : Json();
  };
  json["bubble_measured"] = or_null(r.bubble_measured);
  json["bubble_simulated"] = or_null(r.bubble_simulated);
  if (r.pipeline_ms) {
    json["pipeline_ms"] = *r.pipeline_ms;
    json["messages_exposed_ms"] = or_null(r.messages_exposed_ms);
    Json::Array peaks;
    for (const int64_t bytes : r.rank_peak_bytes) peaks.emplace_back(bytes);
    json["rank_peak_bytes"] = std::move(peaks);
  }
  json["skipped"] = r.skipped;
  if (!r.grad_hash.empty()) json["grad_hash"] = r.grad_hash;
  if (!r.param_hash.empty()) json["param_hash"] = r.param_hash;
  return json;
}

Json to_json(const EvalRecord& r) {
  Json json;
  json["step"] = r.step;
  json["val_loss"] = r.val_loss;
  json["val_bits_per_byte"] = r.val_bits_per_byte;
  json["val_bytes"] = r.val_bytes;
  return json;
}

std::string step_line(const StepRecord& r, int64_t total_steps,
                      double seconds_left) {
  const std::string total = absl::StrCat(total_steps);
  std::string step = absl::StrCat(r.step);
  if (step.size() < total.size()) {
    step.insert(0, total.size() - step.size(), ' ');
  }
  return absl::StrCat(
      "step ", step, "/", total, " | loss ", format("%7.4f", r.loss), " | lr ",
      format("%.2e", r.lr), " | gnorm ", format("%6.3f", r.grad_norm), " | ",
      rate(r.tokens_per_s), " | ", format("%5.0f ms", r.step_ms), " | mem ",
      format("%4.0f", static_cast<double>(r.pool_peak_bytes) / (1 << 20)), "/",
      format("%.0f MiB", static_cast<double>(r.rss_peak_bytes) / (1 << 20)),
      r.bubble_measured && r.bubble_simulated
          ? absl::StrCat(
                " | bubble ", format("%4.1f", 100 * *r.bubble_measured),
                format(" %% (sim %4.1f %%)", 100 * *r.bubble_simulated),
                r.messages_exposed_ms
                    ? format(", messages %.1f ms", *r.messages_exposed_ms)
                    : std::string())
          : std::string(),
      " | ETA ", clock_time(seconds_left), " | skip ", r.skipped);
}

int64_t peak_resident_bytes() {
  FILE* status = std::fopen("/proc/self/status", "r");
  if (status == nullptr) return 0;
  char line[256];
  int64_t bytes = 0;
  while (std::fgets(line, sizeof(line), status) != nullptr) {
    if (std::strncmp(line, "VmHWM:", 6) == 0) {
      bytes = std::strtoll(line + 6, nullptr, 10) * 1024;
    }
  }
  std::fclose(status);
  return bytes;
}

absl::StatusOr<MetricsCut> read_metrics(const std::string& path, int64_t step) {
  MetricsCut cut;
  if (!path_exists(path)) return cut;
  ASSIGN_OR_RETURN(const std::string text,
                   read_file(path, /*max_bytes=*/uint64_t{1} << 34));
  std::optional<std::string> bad;  // the first line that is no record
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    if (end == std::string::npos) break;
    const std::string line = text.substr(begin, end + 1 - begin);
    begin = end + 1;
    const absl::StatusOr<Json> json = parse_json(line, path);
    const Json* of = json.ok() ? json->find("step") : nullptr;
    if (of == nullptr || !of->is_integer()) {
      if (!bad) bad = line.substr(0, 60);
      continue;
    }
    if (bad) {
      return absl::DataLossError(
          absl::StrCat(path, ": a line is no record of a step: ", *bad,
                       "; move the file away to go on without the history"));
    }
    if (of->integer() > step) continue;
    cut.kept += line;
    if (of->integer() == step && json->find("val_loss") != nullptr) {
      cut.evaluated = true;
    }
  }
  cut.cuts = cut.kept != text;
  return cut;
}

}  // namespace tapeline
