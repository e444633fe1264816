// Routings and row widths that dispatch and combine are tested with.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "kernels/route/route_cases.h"

namespace tapeline {

struct DispatchCase {
  RouteCase routing;
  int64_t width;
};

inline std::ostream& operator<<(std::ostream& out, const DispatchCase& c) {
  return out << c.routing.name << "_" << c.width;
}

// One column; under, at and over a vector, a column tile and several tiles.
inline std::vector<DispatchCase> dispatch_cases() {
  std::vector<DispatchCase> out;
  for (const RouteCase& routing : route_cases()) {
    for (int64_t width : {1, 7, 64, 77, 200}) out.push_back({routing, width});
  }
  return out;
}

inline std::string name_of(const DispatchCase& c) {
  std::string name = c.routing.name;
  name += '_';
  name += std::to_string(c.width);
  return name;
}

}  // namespace tapeline
