// Shapes that Muon's iteration is tested with; those of testdata/.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

namespace tapeline {

struct MuonCase {
  int64_t rows, columns;
  std::string name() const {
    return std::to_string(rows) + std::string("x") + std::to_string(columns);
  }
};

inline std::ostream& operator<<(std::ostream& out, const MuonCase& c) {
  return out << c.name();
}

inline const std::vector<MuonCase>& muon_cases() {
  static const std::vector<MuonCase> cases = {
      {5, 9}, {9, 5}, {12, 12}, {17, 33}, {66, 11}, {1, 6}, {6, 1}};
  return cases;
}

}  // namespace tapeline
