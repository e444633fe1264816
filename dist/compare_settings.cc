#include "dist/compare_settings.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

// For what ranks say of an end, whose time may be over.
constexpr absl::Duration kLastWords = absl::Seconds(2);
constexpr absl::Duration kLook = absl::Milliseconds(10);

// A line each, the job's own first.
std::string text_of(const Launched& launch,
                    const std::vector<Setting>& settings) {
  std::string out = absl::StrCat("the number of processes=", launch.world,
                                 "\nthe job=", absl::CEscape(launch.job));
  for (const Setting& s : settings) {
    absl::StrAppend(&out, "\n", s.key, "=", absl::CEscape(s.value));
  }
  return out;
}

// Of a rank's text and rank 0's: the first line that differs.
absl::Status compare(int rank, const std::string& text,
                     const std::string& first) {
  using Pair = std::pair<std::string, std::string>;
  const std::vector<std::string> mine = absl::StrSplit(text, '\n');
  const std::vector<std::string> its = absl::StrSplit(first, '\n');
  for (size_t i = 0; i < std::max(mine.size(), its.size()); ++i) {
    if (i < mine.size() && i < its.size() && mine[i] == its[i]) continue;
    const auto at = [i](const std::vector<std::string>& lines) -> Pair {
      if (i >= lines.size()) return {};
      return absl::StrSplit(lines[i], absl::MaxSplits('=', 1));
    };
    const Pair a = at(mine), b = at(its);
    const std::string what =
        a.first == b.first
            ? absl::StrCat(a.first, " is '", a.second, "', on rank 0 '",
                           b.second, "'")
            : absl::StrCat("there is ", a.first.empty() ? "no more" : a.first,
                           ", on rank 0 ",
                           b.first.empty() ? "no more" : b.first);
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " differs from rank 0: on it ", what,
                     "; start all processes of a job with the same settings, "
                     "and each job with a port of its own"));
  }
  return absl::OkStatus();
}

std::string key(const char* what, int rank) {
  return absl::StrCat(what, "/", rank);
}

// What rank 0 says, once it knows.
absl::StatusOr<std::string> from_rank_0(const Launched& launch, TcpStore& store,
                                        const std::string& name,
                                        absl::Duration timeout) {
  absl::StatusOr<std::string> said = store.get(name, timeout);
  if (!absl::IsDeadlineExceeded(said.status())) return said;
  return absl::UnavailableError(
      absl::StrCat("rank ", launch.rank, ": connect to all ", launch.world,
                   " ranks: rank 0 is there, but not all were in time"));
}

}  // namespace

absl::Status compare_settings(const Launched& launch,
                              const std::vector<Setting>& settings,
                              absl::Time end, TcpStore::Stop stop) {
  const absl::Duration timeout = end - absl::Now();
  const auto left = [end] {
    return std::max(end - absl::Now(), absl::ZeroDuration());
  };
  std::unique_ptr<TcpStoreServer> server;
  if (launch.rank == 0) {
    ASSIGN_OR_RETURN(server, TcpStoreServer::start(launch.store_port));
  }
  ASSIGN_OR_RETURN(
      const std::unique_ptr<TcpStore> store,
      TcpStore::connect(launch.master, launch.store_port, left(), stop));
  const std::string mine = text_of(launch, settings);
  ASSIGN_OR_RETURN(const bool alone,
                   store->set_new(key("settings", launch.rank), mine, left()));
  if (!alone) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", launch.rank, " is there twice: another process has it at ",
        launch.master, ":", launch.store_port,
        "; give each process a rank of its own, and each job a port"));
  }
  if (launch.rank != 0) {
    ASSIGN_OR_RETURN(const std::string first,
                     from_rank_0(launch, *store, "settings/0", left()));
    if (const absl::Status mine_differs = compare(launch.rank, mine, first);
        !mine_differs.ok()) {
      store->set(key("seen", launch.rank), "", kLastWords).IgnoreError();
      return mine_differs;
    }
    ASSIGN_OR_RETURN(const std::string all,
                     from_rank_0(launch, *store, "all", left() + kLastWords));
    RETURN_IF_ERROR(store->set(key("seen", launch.rank), "", kLastWords));
    if (all.empty()) return store->wait_for_end(left() + kLastWords);
    return absl::Status(all[0] == 'd' ? absl::StatusCode::kInvalidArgument
                                      : absl::StatusCode::kUnavailable,
                        all.substr(1));
  }
  // What is said is the first rank's that differs, or else is missing.
  absl::Status differs, missing;
  std::vector<int> there, absent;
  for (int r = 1; r < launch.world; ++r) absent.push_back(r);
  // Once one differs the others are given a little time to be named as well.
  absl::Time until = end;
  while (!absent.empty()) {
    for (size_t i = 0; i < absent.size();) {
      const int r = absent[i];
      ASSIGN_OR_RETURN(
          const std::optional<std::string> its,
          store->peek(key("settings", r), std::max(left(), kLastWords)));
      if (!its) {
        ++i;
        continue;
      }
      there.push_back(r);
      absent.erase(absent.begin() + static_cast<int64_t>(i));
      if (differs.ok()) {
        differs = compare(r, *its, mine);
        if (!differs.ok()) until = std::min(end, absl::Now() + kLastWords);
      }
    }
    if (absl::Now() >= until) break;
    if (stop != nullptr && stop()) return absl::CancelledError("stopped");
    if (!absent.empty()) absl::SleepFor(kLook);
  }
  if (!absent.empty()) {
    missing = absl::UnavailableError(absl::StrCat(
        "rank 0: connect to all ", launch.world, " ranks: rank ",
        absent.front(), " was not there after ",
        absl::FormatDuration(absl::Ceil(timeout, absl::Milliseconds(10)))));
  }
  const absl::Status found = differs.ok() ? missing : differs;
  RETURN_IF_ERROR(store->set(
      "all",
      found.ok() ? "" : absl::StrCat(differs.ok() ? "m" : "d", found.message()),
      kLastWords));
  // The store stays until everybody has read it.
  const absl::Time last = absl::Now() + kLastWords;
  for (const int r : there) {
    const absl::Duration patience =
        found.ok() ? left() + kLastWords
                   : std::max(last - absl::Now(), absl::ZeroDuration());
    const absl::Status seen = store->get(key("seen", r), patience).status();
    if (!found.ok() || seen.ok()) continue;
    if (!absl::IsDeadlineExceeded(seen)) return seen;
    return absl::UnavailableError(absl::StrCat("rank 0: connect to all ",
                                               launch.world, " ranks: rank ", r,
                                               " came and did not go on"));
  }
  return found;
}

}  // namespace tapeline
