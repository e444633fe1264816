#include "tools/train/memory_log.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "autograd/checkpoint.h"
#include "autograd/mode.h"
#include "autograd/tape.h"
#include "runtime/profile.h"

namespace tapeline {
namespace {

std::string pass() {
  if (phase() == Phase::kReplay) return "replay";
  if (in_backward()) return "backward";
  return layer_scope() == 0 ? "" : "forward";
}

// layers.3 of layers.3.self_attn.indexer.
std::string layer() {
  const std::vector<std::string> steps =
      absl::StrSplit(layer_path(layer_scope()), '.');
  const bool numbered =
      steps.size() > 1 && !steps[1].empty() &&
      std::all_of(steps[1].begin(), steps[1].end(),
                  [](char c) { return c >= '0' && c <= '9'; });
  return numbered ? absl::StrCat(steps[0], ".", steps[1]) : steps[0];
}

bool is_head(const std::string& layer) {
  return layer == "lm_head" || layer.starts_with("mtp_head");
}

}  // namespace

Json to_json(const MemoryPart& part) {
  Json json;
  json["pass"] = part.pass;
  json["layer"] = part.layer;
  json["start"] = part.start;
  json["peak"] = part.peak;
  json["end"] = part.end;
  return json;
}

MemoryLog::MemoryLog(Device& device, bool lines)
    : device_(device), lines_(lines), start_(now_seconds()) {
  const PoolStats stats = device.pool().stats();
  live_ = stats.live;
  live_by_tag_ = stats.live_bytes;
  device.pool().set_hook(
      [this](MemoryEvent event, const Block& block) { see(event, block); });
}
MemoryLog::~MemoryLog() { device_.pool().set_hook(nullptr); }

MemoryPart& MemoryLog::part() {
  std::vector<MemoryPart>& timeline = profile_.timeline;
  const std::string in = pass(), at = layer();
  if (timeline.empty() || timeline.back().pass != in ||
      timeline.back().layer != at) {
    timeline.push_back({in, at, live_, live_, live_});
  }
  return timeline.back();
}

void MemoryLog::see(MemoryEvent event, const Block& block) {
  if (event == MemoryEvent::kGone) return;
  const auto bytes = static_cast<int64_t>(block.bytes);
  const auto tag = static_cast<size_t>(block.tag);
  MemoryPart& now_in = part();
  const bool backward = in_backward();
  if (backward && !was_backward_ && profile_.kept.empty()) {
    for (const auto& [data, owner] : owners_) {
      if (owner.tag == Tag::kActivation || owner.tag == Tag::kWorkspace) {
        profile_.kept[owner.layer] += owner.bytes;
      }
    }
  }
  was_backward_ = backward;
  switch (event) {
    case MemoryEvent::kAllocate:
      owners_[block.data] = {now_in.layer, bytes, block.tag};
      live_ += bytes;
      live_by_tag_[tag] += bytes;
      if (is_head(now_in.layer)) head_live_ += bytes;
      break;
    case MemoryEvent::kFree:
      live_ -= bytes;
      live_by_tag_[tag] -= bytes;
      if (const auto owner = owners_.find(block.data); owner != owners_.end()) {
        if (is_head(owner->second.layer)) head_live_ -= bytes;
        owners_.erase(owner);
      }
      break;
    case MemoryEvent::kEvict:
      profile_.evicted += bytes;
      break;
    case MemoryEvent::kLoad:
      profile_.loaded += bytes;
      break;
    case MemoryEvent::kDrop:
      profile_.dropped += bytes;
      break;
    case MemoryEvent::kRefill:
    case MemoryEvent::kGone:
      break;
    case MemoryEvent::kReplay:
      ++profile_.replays;
      break;
  }
  now_in.peak = std::max(now_in.peak, live_);
  now_in.end = live_;
  profile_.head_peak = std::max(profile_.head_peak, head_live_);
  if (live_ > profile_.peak) {
    profile_.peak = live_;
    profile_.peak_at = now_in;
    profile_.by_tag = live_by_tag_;
  }
  if (lines_) add_line(event, block);
}

void MemoryLog::add_line(MemoryEvent event, const Block& block) {
  const int64_t micros = static_cast<int64_t>(1e6 * (now_seconds() - start_));
  Json line;
  line["us"] = micros;
  line["event"] = std::string(name_of(event));
  line["bytes"] = static_cast<int64_t>(block.bytes);
  line["tag"] = std::string(name_of(block.tag));
  line["pass"] = pass();
  line["layer"] = layer_path(layer_scope());
  line["live"] = live_;
  absl::StrAppend(&text_, line.dump(), "\n");
  Json counter, values;
  for (int t = 0; t < kTags; ++t) {
    values[std::string(name_of(static_cast<Tag>(t)))] =
        live_by_tag_[static_cast<size_t>(t)];
  }
  counter["name"] = "pool";
  counter["ph"] = "C";
  counter["pid"] = 0;
  counter["ts"] = micros;
  counter["args"] = std::move(values);
  absl::StrAppend(&trace_, trace_.empty() ? "" : ",\n", counter.dump());
}

MemoryProfile MemoryLog::take() {
  return std::exchange(profile_, MemoryProfile());
}
std::string MemoryLog::take_lines() { return std::exchange(text_, {}); }
std::string MemoryLog::chrome_trace() const {
  return absl::StrCat("{\"traceEvents\": [\n", trace_, "\n]}\n");
}

}  // namespace tapeline
