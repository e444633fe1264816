#include "runtime/shape.h"

#include <sstream>

namespace tapeline {

std::string to_string(const Shape& shape) {
  std::ostringstream out;
  out << shape;
  return out.str();
}

}  // namespace tapeline
