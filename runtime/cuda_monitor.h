// CudaMonitor: what a part of a program asks of CUDA, and how long the device
// works on each thing. For showing that a steady step neither waits nor
// allocates, and for traces.
//
//   ASSIGN_OR_RETURN(auto monitor, CudaMonitor::start());
//   ...
//   CudaReport report = monitor->stop();
//
// Uses CUPTI, whose library is looked for when start() is called: nothing else
// needs it. One at a time in a process, and not beside a profiler. Calls are
// counted on all threads, those of libraries too: a call of the runtime counts
// once, whatever it calls of the driver.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/json.h"

namespace tapeline {

// Work of the device: a kernel, a copy, a fill.
struct CudaActivity {
  // Of a kernel without its parameters; "copy to host", "memset", ...
  std::string name;
  int64_t begin_ns = 0, end_ns = 0;
  int stream = 0;
  int64_t bytes = 0;  // of a copy or fill
  // Of a kernel; {0, 0, 0} otherwise.
  std::array<int32_t, 3> grid{}, block{};
};

struct CudaReport {
  // Calls that block the caller until the device is done, copies among them
  // that are not asynchronous.
  int64_t synchronizations = 0;
  int64_t allocations = 0, frees = 0;  // device and pinned memory
  int64_t creations = 0;               // of events and streams
  int64_t launches = 0, copies = 0;
  int64_t pageable_copies = 0;           // from or to memory that is not pinned
  std::map<std::string, int64_t> calls;  // of all that are counted, by name
  std::vector<CudaActivity> activities;  // by beginning
};

class CudaMonitor {
 public:
  // FailedPrecondition: no CUPTI, or somebody else uses it.
  static absl::StatusOr<std::unique_ptr<CudaMonitor>> start();
  virtual ~CudaMonitor() = default;
  // Waits for the device. Once.
  virtual CudaReport stop() = 0;
};

// Activities of one name, the longest together first.
struct CudaTotal {
  std::string name;
  int64_t calls = 0;
  double us = 0;
};
std::vector<CudaTotal> largest(const CudaReport& report, size_t most);
// The counts, the calls, and the ten largest totals.
Json to_json(const CudaReport& report);
// For chrome://tracing and Perfetto: a row for each stream.
std::string chrome_trace(const CudaReport& report);

}  // namespace tapeline
