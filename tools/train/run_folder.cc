#include "tools/train/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iostream>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/file.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

absl::Status failure(std::string_view call, const std::string& path) {
  const int error = errno;
  const std::string text = absl::StrCat(path, ": ", std::string(call),
                                        " failed: ", std::strerror(error));
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    return absl::ResourceExhaustedError(
        text + "; free some space or write to another disk");
  }
  if (error == EACCES || error == EPERM || error == EROFS) {
    return absl::PermissionDeniedError(text +
                                       "; check the permissions of the folder");
  }
  return absl::InternalError(text);
}

constexpr char kSettings[] = "config.resolved.toml";

// What a run leaves that was ended before it had its settings.
bool is_beginning(const std::string& path) {
  const absl::StatusOr<std::vector<std::string>> names = list_directory(path);
  return names.ok() &&
         std::all_of(names->begin(), names->end(), [](const std::string& name) {
           return name == "run.lock" ||
                  name.starts_with(absl::StrCat(".", kSettings));
         });
}

absl::StatusOr<int> open_to_append(const std::string& path) {
  const int descriptor =
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (descriptor < 0) return failure("open", path);
  return descriptor;
}

absl::Status append(int descriptor, std::string_view text,
                    const std::string& path) {
  while (!text.empty()) {
    const ssize_t wrote = ::write(descriptor, text.data(), text.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return failure("write", path);
    text.remove_prefix(static_cast<size_t>(wrote));
  }
  return absl::OkStatus();
}

// What a killed process was writing or removing: temporary names of file.h,
// snapshot.h and export.h.
absl::Status remove_temporaries(const std::string& folder) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names,
                   list_directory(folder));
  for (const std::string& name : names) {
    const bool replaced =
        name.starts_with("hf.old-") && path_exists(join_path(folder, "hf"));
    if (replaced || name.starts_with(".trash-") ||
        name.find(".tmp-") != std::string::npos) {
      RETURN_IF_ERROR(remove_path(join_path(folder, name)));
    }
  }
  return absl::OkStatus();
}

}  // namespace

RunFolder::RunFolder(RunFolder&& other) noexcept
    : path_(std::move(other.path_)),
      silent_(other.silent_),
      lock_(std::exchange(other.lock_, -1)),
      log_(std::exchange(other.log_, -1)),
      metrics_(std::exchange(other.metrics_, -1)) {}

RunFolder::~RunFolder() {
  for (int descriptor : {metrics_, log_, lock_}) {
    if (descriptor >= 0) ::close(descriptor);
  }
}

std::string RunFolder::file(std::string_view name) const {
  return join_path(path_, std::string(name));
}

absl::Status RunFolder::lock() {
  const std::string name = file("run.lock");
  ASSIGN_OR_RETURN(lock_, open_to_append(name));
  if (::flock(lock_, LOCK_EX | LOCK_NB) == 0) return absl::OkStatus();
  if (errno != EWOULDBLOCK) return failure("flock", name);
  return absl::UnavailableError(absl::StrCat(
      path_,
      ": another process trains in this folder; wait for it or set "
      "run.name"));
}

absl::StatusOr<RunFolder> RunFolder::create(const std::string& path,
                                            const std::string& settings,
                                            std::string* moved) {
  if (path_exists(join_path(path, kSettings))) {
    // Locked while it is renamed, so that a live run keeps its folder.
    RunFolder earlier(path);
    RETURN_IF_ERROR(earlier.lock());
    int k = 1;
    while (path_exists(absl::StrCat(path, ".", k))) ++k;
    *moved = absl::StrCat(path, ".", k);
    RETURN_IF_ERROR(rename_path(path, *moved));
  } else if (path_exists(path) && !is_beginning(path)) {
    return absl::AlreadyExistsError(absl::StrCat(
        path, " is no run: it lacks ", kSettings,
        "; move it away, or set run.name or run.dir to another place"));
  }
  RETURN_IF_ERROR(make_directories(path));
  RunFolder folder(path);
  RETURN_IF_ERROR(folder.lock());
  RETURN_IF_ERROR(write_file_atomic(folder.file(kSettings), settings));
  return folder;
}

absl::StatusOr<RunFolder> RunFolder::reopen(const std::string& path) {
  RunFolder folder(path);
  if (!path_exists(folder.file(kSettings))) {
    return absl::NotFoundError(
        absl::StrCat(path, " is no run: it lacks ", kSettings,
                     "; train from the start without --resume"));
  }
  RETURN_IF_ERROR(folder.lock());
  return folder;
}

absl::Status RunFolder::begin() {
  RETURN_IF_ERROR(make_directories(file("samples")));
  RETURN_IF_ERROR(make_directories(file("snapshots")));
  for (const char* folder : {"", "samples", "snapshots"}) {
    RETURN_IF_ERROR(remove_temporaries(file(folder)));
  }
  ASSIGN_OR_RETURN(log_, open_to_append(file("log.txt")));
  return absl::OkStatus();
}

void RunFolder::say(std::string_view line) {
  if (silent_) return;
  std::string text(line);
  text += '\n';
  std::cout << text << std::flush;
  append(log_, text, path_).IgnoreError();
}

absl::Status RunFolder::append_metrics(const Json& record) {
  if (silent_) return absl::OkStatus();
  const std::string name = file("metrics.jsonl");
  if (metrics_ < 0) {
    ASSIGN_OR_RETURN(metrics_, open_to_append(name));
  }
  return append(metrics_, record.dump() + "\n", name);
}

absl::Status RunFolder::sync_metrics() {
  if (metrics_ >= 0 && ::fdatasync(metrics_) < 0) {
    return failure("fdatasync", file("metrics.jsonl"));
  }
  return absl::OkStatus();
}

}  // namespace tapeline
