#include "autograd/offload.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "autograd/checkpoint.h"
#include "autograd/tape_state.h"
#include "runtime/check.h"

namespace tapeline {
namespace {

double now() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

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

  void list(const std::vector<Tensor>& tensors) {
    for (const Tensor& tensor : tensors) {
      if (!tensor || tensor.bytes() == 0) continue;
      if (tensor.storage()->tag() == Tag::kParameter || find(tensor)) continue;
      listed_.push_back({tensor.storage(), false});
    }
  }

  SavedHandle pack(Tensor& kept) override {
    Listed* listed = find(kept);
    if (listed == nullptr) return {};
    ++saved_;
    if (!plan_.copied) return {{1, 0}};
    graph_.counters_.repeated += listed->begun;
    if (!std::exchange(listed->begun, true)) begin(*listed->storage);
    return {{1, 0}};
  }
  Tensor unpack(SavedHandle handle, const Tensor& kept) override {
    if (handle.words[0] != 0) {
      if (bring_back()) ++graph_.counters_.late;
      if (previous_ != nullptr && !std::exchange(asked_previous_, true)) {
        graph_.counters_.prefetched += previous_->bring_back();
      }
    }
    return kept;
  }
  void drop(SavedHandle handle) override {
    if (handle.words[0] == 0 || --saved_ > 0 || open_) return;
    listed_.clear();
  }

  void close() {
    open_ = false;
    if (saved_ == 0) listed_.clear();
  }
  // The bytes leave the device; those under a lease stay.
  void evict() {
    for (Listed& listed : listed_) {
      if (listed.storage->evict()) listed.storage->set_strict(graph_.strict_);
    }
  }

 private:
  struct Listed {
    StoragePtr storage;
    bool begun;
  };

  Listed* find(const Tensor& tensor) {
    for (Listed& listed : listed_) {
      if (listed.storage == tensor.storage()) return &listed;
    }
    return nullptr;
  }
  void begin(Storage& storage) {
    const double start = now();
    const auto bytes = static_cast<int64_t>(storage.bytes());
    OffloadCounters& counters = graph_.counters_;
    if (const Residency where = storage.residency();
        where == Residency::kCopying || where == Residency::kHost) {
      ++counters.repeated;  // another window moves it
      return;
    }
    if (storage.copy_out()) {
      ++counters.copies;
      counters.copied_bytes += bytes;
    } else {
      counters.refused_bytes += bytes;
    }
    counters.exposed_seconds += now() - start;
  }
  // Whether something had left.
  bool bring_back() {
    bool away = false;
    for (Listed& listed : listed_) {
      const Residency residency = listed.storage->residency();
      if (residency == Residency::kCopying) ++graph_.counters_.cancelled;
      if (residency == Residency::kHost) {
        away = true;
        graph_.counters_.loaded_bytes +=
            static_cast<int64_t>(listed.storage->bytes());
      } else if (residency != Residency::kCopying) {
        continue;
      }
      const double start = now();
      listed.storage->load();
      graph_.counters_.exposed_seconds += now() - start;
    }
    return away;
  }

  OffloadGraph& graph_;
  const PlannedWindow& plan_;
  Window* const previous_;
  std::vector<Listed> listed_;
  int64_t saved_ = 0;  // saved tensors that hold a listed storage
  bool open_ = true, asked_previous_ = false;
};

OffloadGraph::OffloadGraph(std::vector<PlannedWindow> plan, bool strict)
    : plan_(std::move(plan)), strict_(strict) {}
OffloadGraph::~OffloadGraph() = default;

OffloadGraph::Window* OffloadGraph::open(int layer,
                                         const std::vector<Tensor>& activations,
                                         const std::vector<Tensor>& ids) {
  if (grad_mode() != GradMode::kOn || internal::current_tape() == nullptr ||
      phase() == Phase::kReplay || windows_.size() == plan_.size()) {
    return nullptr;
  }
  const PlannedWindow& plan = plan_[windows_.size()];
  if (plan.layer != layer) return nullptr;
  Window* previous = windows_.empty() ? nullptr : windows_.back().get();
  if (previous == nullptr) began_ = now();
  windows_.push_back(std::make_shared<Window>(*this, plan, previous));
  ++counters_.windows;
  if (plan.activations) windows_.back()->list(activations);
  if (plan.ids) windows_.back()->list(ids);
  return windows_.back().get();
}

void OffloadGraph::close() {
  closed_.push_back(now() - began_);
  windows_.back()->close();
  if (windows_.size() > 1) windows_[windows_.size() - 2]->evict();
}

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
                             const std::vector<Tensor>& ids) {
  if (graph == nullptr) return;
  if (graph->open(layer, activations, ids) == nullptr) return;
  graph_ = graph;
  hooks_.emplace(graph->windows_.back());
}

OffloadWindow::~OffloadWindow() {
  hooks_.reset();
  if (graph_ != nullptr) graph_->close();
}

}  // namespace tapeline
