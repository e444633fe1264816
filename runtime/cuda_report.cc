// What can be said about a report; no CUDA here.
#include <algorithm>
#include <cstdio>
#include <set>

#include "absl/strings/str_cat.h"
#include "runtime/cuda_monitor.h"

namespace tapeline {

std::vector<CudaTotal> largest(const CudaReport& report, size_t most) {
  std::map<std::string, CudaTotal> by_name;
  for (const CudaActivity& a : report.activities) {
    CudaTotal& total = by_name[a.name];
    total.name = a.name;
    ++total.calls;
    total.us += 1e-3 * static_cast<double>(a.end_ns - a.begin_ns);
  }
  std::vector<CudaTotal> out;
  for (auto& [name, total] : by_name) out.push_back(std::move(total));
  std::stable_sort(
      out.begin(), out.end(),
      [](const CudaTotal& a, const CudaTotal& b) { return a.us > b.us; });
  if (out.size() > most) out.resize(most);
  return out;
}

Json to_json(const CudaReport& r) {
  Json json;
  json["schema"] = 1;
  json["synchronizations"] = r.synchronizations;
  json["allocations"] = r.allocations;
  json["frees"] = r.frees;
  json["pageable_copies"] = r.pageable_copies;
  json["creations"] = r.creations;
  json["launches"] = r.launches;
  json["copies"] = r.copies;
  Json calls = Json::Object();
  for (const auto& [name, count] : r.calls) calls[name] = count;
  json["calls"] = std::move(calls);
  double busy = 0;
  int64_t end = 0;
  for (const CudaActivity& a : r.activities) {
    busy += 1e-3 * static_cast<double>(std::max<int64_t>(
                       0, a.end_ns - std::max(end, a.begin_ns)));
    end = std::max(end, a.end_ns);
  }
  json["span_us"] =
      r.activities.empty()
          ? 0.0
          : 1e-3 * static_cast<double>(end - r.activities[0].begin_ns);
  json["busy_us"] = busy;  // with one thing at least under way
  Json::Array rows;
  for (const CudaTotal& total : largest(r, 10)) {
    Json row;
    row["name"] = total.name;
    row["calls"] = total.calls;
    row["us"] = total.us;
    rows.push_back(std::move(row));
  }
  json["largest"] = std::move(rows);
  return json;
}

namespace {

Json extents(const std::array<int32_t, 3>& of) {
  return Json::Array{Json(int64_t{of[0]}), Json(int64_t{of[1]}),
                     Json(int64_t{of[2]})};
}

}  // namespace

std::string chrome_trace(const CudaReport& report) {
  Json::Array events;
  std::set<int> streams;
  for (const CudaActivity& a : report.activities) streams.insert(a.stream);
  for (int stream : streams) {
    Json name, row;
    name["name"] = absl::StrCat("stream ", stream);
    row["ph"] = "M";
    row["pid"] = 0;
    row["tid"] = stream;
    row["name"] = "thread_name";
    row["args"] = std::move(name);
    events.push_back(std::move(row));
  }
  const int64_t start =
      report.activities.empty() ? 0 : report.activities[0].begin_ns;
  for (const CudaActivity& a : report.activities) {
    Json row;
    row["ph"] = "X";
    row["pid"] = 0;
    row["tid"] = a.stream;
    row["name"] = a.name;
    row["ts"] = 1e-3 * static_cast<double>(a.begin_ns - start);
    row["dur"] = 1e-3 * static_cast<double>(a.end_ns - a.begin_ns);
    Json arguments;
    if (a.bytes > 0) {
      arguments["bytes"] = a.bytes;
    } else if (a.grid[0] > 0) {
      arguments["grid"] = extents(a.grid);
      arguments["block"] = extents(a.block);
    }
    if (arguments.is_object()) row["args"] = std::move(arguments);
    events.push_back(std::move(row));
  }
  Json json;
  json["traceEvents"] = std::move(events);
  return json.dump() + "\n";
}

}  // namespace tapeline
