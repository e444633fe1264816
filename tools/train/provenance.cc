#include "tools/train/provenance.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "runtime/cuda_device.h"
#include "runtime/device.h"
#include "runtime/file.h"

namespace tapeline {
namespace {

std::string first_line(const std::string& path) {
  const absl::StatusOr<std::string> text = read_file(path);
  if (!text.ok()) return "";
  return text->substr(0, text->find('\n'));
}

// The commit checked out in the folder or one above it.
Json commit_of(std::string folder) {
  while (!is_directory(join_path(folder, ".git"))) {
    if (folder == "/" || folder == ".") {
      const char* given = std::getenv("TAPELINE_COMMIT");
      return given == nullptr ? Json() : Json(given);
    }
    folder = parent_path(folder);
  }
  const std::string git = join_path(folder, ".git");
  const std::string head = first_line(join_path(git, "HEAD"));
  if (!head.starts_with("ref: ")) return head.empty() ? Json() : Json(head);
  const std::string commit = first_line(join_path(git, head.substr(5)));
  return commit.empty() ? Json() : Json(commit);
}

std::string cpu_model() {
  FILE* info = std::fopen("/proc/cpuinfo", "r");
  if (info == nullptr) return "";
  char line[512];
  std::string model;
  while (model.empty() && std::fgets(line, sizeof(line), info) != nullptr) {
    const std::string text = line;
    const size_t colon = text.find(": ");
    if (text.starts_with("model name") && colon != std::string::npos) {
      model = text.substr(colon + 2, text.size() - colon - 3);
    }
  }
  std::fclose(info);
  return model;
}

}  // namespace

Json provenance(const std::vector<std::string>& command_line, uint64_t seed,
                int threads) {
  Json json;
  Json::Array words;
  for (const std::string& word : command_line) words.emplace_back(word);
  json["command_line"] = std::move(words);
  json["seed"] = static_cast<int64_t>(seed);
  json["threads"] = threads;
  json["time_unix"] = static_cast<int64_t>(std::time(nullptr));
  const char* workspace = std::getenv("BUILD_WORKSPACE_DIRECTORY");
  json["commit"] = commit_of(workspace != nullptr ? workspace : ".");
  json["compiler"] = "gcc " __VERSION__;
#ifdef NDEBUG
  json["asserts"] = false;
#else
  json["asserts"] = true;
#endif
  struct utsname host {};
  if (uname(&host) == 0) {
    json["host"] = host.nodename;
    json["kernel"] = absl::StrCat(host.sysname, " ", host.release);
  }
  json["cpu"] = cpu_model();
  json["processors"] = static_cast<int64_t>(sysconf(_SC_NPROCESSORS_ONLN));
  json["memory_bytes"] =
      static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  if (Device::current().kind() == DeviceKind::kCuda) {
    if (const auto gpu = cuda_properties(); gpu.ok()) {
      json["device"] = gpu->name;
      json["device_uuid"] = gpu->uuid;
      json["cuda_driver"] = gpu->driver;
    }
  }
  return json;
}

}  // namespace tapeline
