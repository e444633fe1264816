#include "runtime/profile.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <memory>
#include <mutex>

#include "runtime/file.h"
#include "runtime/nvtx.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

constexpr std::string_view kNames[] = {
    "step",
    "data",
    "forward",
    "backward",
    "backward_inputs",
    "backward_weights",
    "replay",
    "optimizer",
    "eval",
    "sample",
    "snapshot",
    "export",
    "adamw",
    "attention",
    "aux_loss",
    "combine",
    "cross_entropy",
    "dispatch",
    "elementwise",
    "embedding",
    "grad_norm",
    "grouped_matmul",
    "indexer",
    "indexer_loss",
    "matmul",
    "muon",
    "rms_norm",
    "rope",
    "route",
    "softmax",
    "sparse_attention",
    "swiglu",
    "top_k",
    "copy",
    "offload",
    "reload",
    "send",
    "receive",
    "all_reduce",
    "all_to_all",
    "wait",
};
static_assert(std::size(kNames) == kRanges, "every range has a name");

constexpr size_t kMaxEvents = 1'000'000;

struct TraceEvent {
  int64_t begin_ns;
  int64_t ns;
  Range range;
};

// One thread's sums. Written by its thread alone; the atomics let a report read
// them meanwhile.
struct Sums {
  struct Row {
    std::atomic<int64_t> count{0}, total_ns{0}, self_ns{0};
    int open = 0;
  };
  std::array<Row, kRanges> rows;
  ProfileRange* innermost = nullptr;

  std::mutex mutex;  // guards what follows
  std::vector<TraceEvent> events;
  int64_t dropped = 0;
};

struct Registry {
  std::mutex mutex;
  // Kept when a thread ends: its work was part of the run.
  std::vector<std::shared_ptr<Sums>> threads;
};

// Leaked: threads may end after static destructors have run.
Registry& registry() {
  static Registry& registry = *new Registry;
  return registry;
}

Sums& this_thread() {
  thread_local const std::shared_ptr<Sums> sums = [] {
    auto made = std::make_shared<Sums>();
    std::lock_guard lock(registry().mutex);
    registry().threads.push_back(made);
    return made;
  }();
  return *sums;
}

void add(std::atomic<int64_t>& to, int64_t more) {
  to.store(to.load(std::memory_order_relaxed) + more,
           std::memory_order_relaxed);
}

std::string event_text(const TraceEvent& event, int64_t origin_ns, int rank,
                       size_t thread) {
  char text[192];
  std::snprintf(text, sizeof(text),
                ",\n{\"name\":\"%s\",\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,"
                "\"pid\":%d,\"tid\":%zu}",
                std::string(name_of(event.range)).c_str(),
                static_cast<double>(event.begin_ns - origin_ns) / 1e3,
                static_cast<double>(event.ns) / 1e3, rank, thread);
  return text;
}

}  // namespace

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::atomic<ProfileMode> internal::current_profile_mode{ProfileMode::kOff};

std::string_view name_of(Range range) {
  return kNames[static_cast<size_t>(range)];
}

void set_profile(ProfileMode mode) {
  internal::current_profile_mode.store(mode, std::memory_order_relaxed);
}
ProfileMode profile_mode() {
  return internal::current_profile_mode.load(std::memory_order_relaxed);
}

void ProfileRange::begin(Range range) {
  Sums& sums = this_thread();
  range_ = range;
  parent_ = sums.innermost;
  sums.innermost = this;
  ++sums.rows[static_cast<size_t>(range)].open;
  nvtx_push(name_of(range).data());  // of literals: they end in 0
  begin_ns_ = now_ns();
}

void ProfileRange::end() {
  const int64_t ns = now_ns() - begin_ns_;
  nvtx_pop();
  Sums& sums = this_thread();
  Sums::Row& row = sums.rows[static_cast<size_t>(range_)];
  add(row.count, 1);
  add(row.self_ns, ns - inner_ns_);
  if (--row.open == 0) add(row.total_ns, ns);
  sums.innermost = parent_;
  if (parent_ != nullptr) parent_->inner_ns_ += ns;
  if (profile_mode() == ProfileMode::kTrace) {
    std::lock_guard lock(sums.mutex);
    if (sums.events.size() < kMaxEvents) {
      sums.events.push_back({begin_ns_, ns, range_});
    } else {
      ++sums.dropped;
    }
  }
}

std::vector<ProfileRow> profile_report() {
  std::vector<ProfileRow> rows;
  for (int r = 0; r < kRanges; ++r) rows.push_back({static_cast<Range>(r)});
  std::lock_guard lock(registry().mutex);
  for (const auto& thread : registry().threads) {
    for (size_t r = 0; r < rows.size(); ++r) {
      const Sums::Row& row = thread->rows[r];
      rows[r].count += row.count.load(std::memory_order_relaxed);
      rows[r].total_ns += row.total_ns.load(std::memory_order_relaxed);
      rows[r].self_ns += row.self_ns.load(std::memory_order_relaxed);
    }
  }
  std::erase_if(rows, [](const ProfileRow& row) { return row.count == 0; });
  std::stable_sort(rows.begin(), rows.end(),
                   [](const ProfileRow& a, const ProfileRow& b) {
                     return a.self_ns > b.self_ns;
                   });
  return rows;
}

std::string profile_table() {
  char line[128];
  std::snprintf(line, sizeof(line), "%-18s %10s %12s %12s\n", "range", "calls",
                "self ms", "total ms");
  std::string out = line;
  for (const ProfileRow& row : profile_report()) {
    std::snprintf(line, sizeof(line), "%-18s %10lld %12.3f %12.3f\n",
                  std::string(name_of(row.range)).c_str(),
                  static_cast<long long>(row.count),
                  static_cast<double>(row.self_ns) / 1e6,
                  static_cast<double>(row.total_ns) / 1e6);
    out += line;
  }
  return out;
}

void reset_profile() {
  std::lock_guard lock(registry().mutex);
  for (const auto& thread : registry().threads) {
    for (Sums::Row& row : thread->rows) {
      row.count.store(0, std::memory_order_relaxed);
      row.total_ns.store(0, std::memory_order_relaxed);
      row.self_ns.store(0, std::memory_order_relaxed);
    }
    std::lock_guard events(thread->mutex);
    thread->events.clear();
    thread->dropped = 0;
  }
}

absl::Status write_chrome_trace(const std::string& path, int rank) {
  std::vector<std::vector<TraceEvent>> threads;
  int64_t dropped = 0, origin_ns = INT64_MAX;
  {
    std::lock_guard lock(registry().mutex);
    for (const auto& thread : registry().threads) {
      std::lock_guard events(thread->mutex);
      threads.push_back(thread->events);
      dropped += thread->dropped;
      for (const TraceEvent& event : thread->events) {
        origin_ns = std::min(origin_ns, event.begin_ns);
      }
    }
  }
  ASSIGN_OR_RETURN(FileWriter writer, FileWriter::create(path));
  std::string text =
      "{\"displayTimeUnit\":\"ms\",\"dropped\":" + std::to_string(dropped) +
      ",\"traceEvents\":[\n" +
      "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":" +
      std::to_string(rank) + ",\"args\":{\"name\":\"rank " +
      std::to_string(rank) + "\"}}";
  for (size_t thread = 0; thread < threads.size(); ++thread) {
    for (const TraceEvent& event : threads[thread]) {
      text += event_text(event, origin_ns, rank, thread);
      if (text.size() < 1 << 20) continue;
      RETURN_IF_ERROR(writer.append(text));
      text.clear();
    }
  }
  RETURN_IF_ERROR(writer.append(text + "\n]}\n"));
  return writer.commit();
}

}  // namespace tapeline
