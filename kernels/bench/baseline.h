// Rows of a baseline file, one JSON object per line: an "env" row with the
// device, then rows with op, impl, shape and us.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"

namespace tapeline::bench {

class Baseline {
 public:
  // Returns what is wrong with the file, or nothing. Rows of another device are
  // left out, since only times of one device compare; `err` is told if none
  // remain.
  std::string read(const std::string& path, const std::string& device,
                   std::ostream& err);

  // The fastest row of the same op whose shape has all of `shape`; or null.
  const nlohmann::ordered_json* find(const std::string& op,
                                     const nlohmann::ordered_json& shape) const;

 private:
  std::vector<nlohmann::ordered_json> rows_;
};

}  // namespace tapeline::bench
