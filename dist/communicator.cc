#include "dist/communicator.h"

#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace tapeline {

std::string to_string(const std::vector<TensorSpec>& specs) {
  return absl::StrJoin(specs, " ", [](std::string* out, const TensorSpec& s) {
    std::ostringstream shape;
    shape << s.dtype << s.shape;
    absl::StrAppend(out, shape.str());
  });
}

}  // namespace tapeline
