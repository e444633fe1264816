#include "autograd/offload.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "autograd/checkpoint.h"
#include "runtime/profile.h"

namespace tapeline {
OffloadCounters& OffloadCounters::operator+=(const OffloadCounters& other) {
  windows += other.windows;
  copies += other.copies;
  copied_bytes += other.copied_bytes;
  loaded_bytes += other.loaded_bytes;
  repeated += other.repeated;
  prefetched += other.prefetched;
  late += other.late;
  cancelled += other.cancelled;
  refused_bytes += other.refused_bytes;
  exposed_seconds += other.exposed_seconds;
  return *this;
}

class OffloadGraph::Window : public SavedTensorHooks {
 public:
  Window(OffloadGraph& graph, const PlannedWindow& plan, Window* previous)
      : graph_(graph), plan_(plan), previous_(previous) {}
  const char* name() const override { return "offload window"; }

  void list(const std::vector<Tensor>& tensors) {
    for (const Tensor& x : tensors) {
      if (!x || x.bytes() == 0 || x.storage()->tag() == Tag::kParameter) {
        continue;
      }
      listed_.try_emplace(x.storage()->id(), Listed{x.storage()});
    }
  }

  SavedHandle pack(Tensor& kept) override {
    const auto found = listed_.find(kept.storage()->id());
    if (found == listed_.end()) return {};
    if (plan_.copied) copy_out(found->second, *kept.storage());
    return {{1, 0}};
  }
  Tensor unpack(SavedHandle handle, const Tensor& kept) override {
    if (handle.words[0] != 0) {
      graph_.counters_.late += bring_back();
      if (previous_ != nullptr && !std::exchange(asked_previous_, true)) {
        graph_.counters_.prefetched += previous_->bring_back();
      }
    }
    return kept;
  }

  // The bytes leave the device; those under a lease stay.
  void evict() {
    for (const auto& [id, listed] : listed_) {
      const StoragePtr storage = listed.storage.lock();
      if (storage && storage->evict()) storage->set_strict(graph_.strict_);
    }
  }

 private:
  // Held by who saves it alone.
  struct Listed {
    std::weak_ptr<Storage> storage;
    bool begun = false;
  };

  void copy_out(Listed& listed, Storage& storage) {
    OffloadCounters& counters = graph_.counters_;
    const Residency where = storage.residency();
    const bool begun = std::exchange(listed.begun, true);
    if (begun || where == Residency::kCopying || where == Residency::kHost) {
      ++counters.repeated;  // by this window or another
      return;
    }
    const double start = now_seconds();
    const auto bytes = static_cast<int64_t>(storage.bytes());
    if (storage.copy_out()) {
      ++counters.copies;
      counters.copied_bytes += bytes;
    } else {
      counters.refused_bytes += bytes;
    }
    counters.exposed_seconds += now_seconds() - start;
  }

  // Whether something had left.
  bool bring_back() {
    OffloadCounters& counters = graph_.counters_;
    bool away = false;
    for (const auto& [id, listed] : listed_) {
      const StoragePtr storage = listed.storage.lock();
      if (storage == nullptr) continue;
      const bool host = storage->residency() == Residency::kHost;
      if (!host && storage->residency() != Residency::kCopying) continue;
      away |= host;
      counters.cancelled += !host;
      if (host) counters.loaded_bytes += static_cast<int64_t>(storage->bytes());
      const double start = now_seconds();
      storage->load();
      counters.exposed_seconds += now_seconds() - start;
    }
    return away;
  }

  OffloadGraph& graph_;
  const PlannedWindow& plan_;
  Window* const previous_;
  std::map<uint64_t, Listed> listed_;  // by the storage's id
  bool asked_previous_ = false;
};

absl::Status OffloadGraph::status() const {
  const int64_t planned = planned_bytes(plan_), out = counters_.copied_bytes,
                back = counters_.loaded_bytes;
  if (!strict_ || (out == planned && back == planned)) return absl::OkStatus();
  if (counters_.refused_bytes > 0) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "pinned memory is full: ", counters_.refused_bytes, " of ", planned,
        " bytes could not be offloaded; raise offload.pinned_cap_mib or set "
        "offload.strict to false"));
  }
  return absl::InternalError(
      absl::StrCat("offload moved ", out, " bytes out and ", back, " back in ",
                   windows_.size(), " windows, the plan has ", planned, " in ",
                   plan_.size()));
}

OffloadWindow::OffloadWindow(OffloadGraph* graph, int layer,
                             const std::vector<Tensor>& activations,
                             const std::vector<Tensor>& ids)
    : graph_(graph) {
  if (graph == nullptr || !internal::records_original()) return;
  auto& windows = graph->windows_;
  if (windows.size() == graph->plan_.size()) return;
  const PlannedWindow& plan = graph->plan_[windows.size()];
  if (plan.layer != layer) return;
  if (windows.empty()) graph->began_ = now_seconds();
  windows.push_back(std::make_shared<OffloadGraph::Window>(
      *graph, plan, windows.empty() ? nullptr : windows.back().get()));
  ++graph->counters_.windows;
  if (plan.activations) windows.back()->list(activations);
  if (plan.ids) windows.back()->list(ids);
  hooks_.emplace(windows.back());
}

OffloadWindow::~OffloadWindow() {
  if (!hooks_) return;
  graph_->closed_.push_back(now_seconds() - graph_->began_);
  const auto& windows = graph_->windows_;
  if (windows.size() > 1) windows[windows.size() - 2]->evict();
}

}  // namespace tapeline
