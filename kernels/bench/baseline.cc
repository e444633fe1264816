#include "kernels/bench/baseline.h"

#include <fstream>

namespace tapeline::bench {

using Json = nlohmann::ordered_json;

std::string Baseline::read(const std::string& path, const std::string& device,
                           std::ostream& err) {
  std::ifstream in(path);
  if (!in) return path + ": cannot be read; pass an existing --baseline";
  bool same_device = false;
  for (std::string line; std::getline(in, line);) {
    const Json row = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!row.is_object()) return path + ": a line is not a JSON object";
    const std::string op = row.value("op", "");
    if (op == "env") same_device = row.value("device", "") == device;
    if (same_device && row.contains("us")) rows_.push_back(row);
  }
  if (rows_.empty()) {
    err << path << ": nothing measured on " << device
        << "; the baseline column stays empty\n";
  }
  return "";
}

const Json* Baseline::find(const std::string& op, const Json& shape) const {
  const Json* best = nullptr;
  for (const Json& row : rows_) {
    bool same = row["op"] == op;
    for (const auto& [key, value] : shape.items()) {
      same = same && row["shape"].contains(key) && row["shape"][key] == value;
    }
    if (same && (!best || row["us"] < (*best)["us"])) best = &row;
  }
  return best;
}

}  // namespace tapeline::bench
