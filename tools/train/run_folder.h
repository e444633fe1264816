// The folder of a run: who writes there, and what goes to its log and metrics.
//
//   config.resolved.toml  provenance.json  log.txt  metrics.jsonl  samples/
//   snapshots/  hf/  run.lock
//
// One process at a time: it holds a lock on run.lock. A new run never writes
// into an earlier run's folder: that is renamed to <folder>.1, .2, ... first. A
// folder without config.resolved.toml is no run's and stays as it is.
// Lines are appended whole, by one write each.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/json.h"

namespace tapeline {

class RunFolder {
 public:
  // Of a new run with these settings, locked. Unavailable: another process
  // trains there; AlreadyExists: something that is no run is there. `moved` is
  // the new name of an earlier run's folder, if there was one.
  static absl::StatusOr<RunFolder> create(const std::string& path,
                                          const std::string& settings,
                                          std::string* moved);
  // Of the run that goes on, locked. Unavailable as above; NotFound: no run's
  // folder is there.
  static absl::StatusOr<RunFolder> reopen(const std::string& path);
  // Of a rank that does not write: what it says goes nowhere.
  static RunFolder of_another(const std::string& path) {
    RunFolder folder(path);
    folder.silent_ = true;
    return folder;
  }
  // Makes the folders within and begins the log; until then nothing is changed.
  absl::Status begin();

  RunFolder(RunFolder&& other) noexcept;
  RunFolder& operator=(RunFolder&&) = delete;
  ~RunFolder();

  const std::string& path() const { return path_; }
  std::string file(std::string_view name) const;

  // To the console and log.txt. Failures to log are not failures of the run.
  void say(std::string_view line);
  // To metrics.jsonl. Before the first one on, resumed runs cut it (metrics.h).
  absl::Status append_metrics(const Json& record);
  // Makes the metrics so far durable.
  absl::Status sync_metrics();

 private:
  explicit RunFolder(std::string path) : path_(std::move(path)) {}
  absl::Status lock();

  std::string path_;
  bool silent_ = false;
  int lock_ = -1, log_ = -1, metrics_ = -1;
};

}  // namespace tapeline
