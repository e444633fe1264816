#include "tools/train/exit_code.h"

#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace tapeline {
namespace {

constexpr char kKey[] = "tapeline.exit_code";

}  // namespace

absl::Status ending(ExitCode code, absl::Status status) {
  if (!status.ok()) {
    status.SetPayload(kKey, absl::Cord(absl::StrCat(static_cast<int>(code))));
  }
  return status;
}

ExitCode exit_code(const absl::Status& status) {
  if (status.ok()) return kExitDone;
  const auto payload = status.GetPayload(kKey);
  if (!payload) return kExitBadInput;
  return static_cast<ExitCode>(std::stoi(std::string(*payload)));
}

}  // namespace tapeline
