#include "runtime/fault.h"

#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <limits>

#include "runtime/check.h"

namespace tapeline {
namespace {

enum class Kind { kNone, kKill, kEio, kEnospc, kEintr, kShort };

struct Plan {
  Kind kind = Kind::kNone;
  int64_t first = 0;
  int64_t last = 0;
};

bool parse(std::string_view text, Plan& plan) {
  plan = {};
  if (text.empty()) return true;
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) return false;
  const std::string_view kind = text.substr(0, colon);
  if (kind == "kill")
    plan.kind = Kind::kKill;
  else if (kind == "eio")
    plan.kind = Kind::kEio;
  else if (kind == "enospc")
    plan.kind = Kind::kEnospc;
  else if (kind == "eintr")
    plan.kind = Kind::kEintr;
  else if (kind == "short")
    plan.kind = Kind::kShort;
  else
    return false;
  std::string_view number = text.substr(colon + 1);
  const bool onwards = number.ends_with('+');
  if (onwards) number.remove_suffix(1);
  const char* end = number.data() + number.size();
  const auto parsed = std::from_chars(number.data(), end, plan.first);
  if (parsed.ec != std::errc() || parsed.ptr != end || plan.first < 1) {
    return false;
  }
  plan.last = onwards ? std::numeric_limits<int64_t>::max() : plan.first;
  return true;
}

Plan from_environment() {
  Plan plan;
  const char* text = std::getenv("TAPELINE_FAULT");
  if (text != nullptr) {
    // A fault that is silently not injected would let a crash test pass.
    CHECK(parse(text, plan)) << "TAPELINE_FAULT=" << text
                             << " is not kill|eio|enospc|eintr|short:K[+]";
  }
  return plan;
}

Plan& plan() {
  static Plan plan = from_environment();
  return plan;
}

std::atomic<int64_t> points{0};

}  // namespace

Fault next_fault(size_t write_bytes) {
  const int64_t point = points.fetch_add(1) + 1;
  const Plan& now = plan();
  Fault fault{.bytes = write_bytes};
  if (now.kind == Kind::kNone || point < now.first || point > now.last) {
    return fault;
  }
  switch (now.kind) {
    case Kind::kNone:
      break;
    case Kind::kKill:
      fault.kill = true;
      fault.bytes = write_bytes / 2;
      break;
    case Kind::kEio:
      fault.error = EIO;
      fault.bytes = 0;
      break;
    case Kind::kEnospc:
      fault.error = ENOSPC;
      fault.bytes = write_bytes / 2;
      break;
    case Kind::kEintr:
      fault.error = EINTR;
      fault.bytes = 0;
      break;
    case Kind::kShort:
      fault.bytes = write_bytes > 0 ? 1 : 0;
      break;
  }
  return fault;
}

int64_t fault_points() { return points.load(); }

bool set_fault(std::string_view specification) {
  Plan parsed;
  if (!parse(specification, parsed)) return false;
  plan() = parsed;
  points.store(0);
  return true;
}

}  // namespace tapeline
