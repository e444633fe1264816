#include "runtime/gather_plan.h"

#include <cstdint>
#include <limits>

namespace tapeline {
namespace {

constexpr size_t kWidest = 16;

// Whether elements come in whole groups of n neighbours.
bool groups(const GatherPlan& plan, int64_t n) {
  const int last = plan.dims - 1;
  if (plan.stride[last] != 1 || plan.size[last] % n != 0) return false;
  for (int d = 0; d < last; ++d) {
    if (plan.stride[d] % n != 0) return false;
  }
  return true;
}

}  // namespace

GatherPlan plan_gather(size_t element, const Shape& shape, const Shape& strides,
                       size_t alignment) {
  GatherPlan plan{.word = element, .count = shape.elements()};
  for (int d = 0; d < shape.rank(); ++d) {
    if (shape[d] == 1) continue;
    const int before = plan.dims - 1;
    if (before >= 0 && plan.stride[before] == shape[d] * strides[d]) {
      plan.size[before] *= shape[d];
      plan.stride[before] = strides[d];
    } else {
      plan.size[plan.dims] = shape[d];
      plan.stride[plan.dims++] = strides[d];
    }
  }
  if (plan.dims == 0) plan.size[plan.dims++] = plan.stride[0] = 1;
  for (size_t word = kWidest; word > element; word /= 2) {
    const auto n = static_cast<int64_t>(word / element);
    if (alignment % word != 0 || !groups(plan, n)) continue;
    plan.word = word;
    plan.count /= n;
    plan.size[plan.dims - 1] /= n;
    for (int d = 0; d < plan.dims - 1; ++d) plan.stride[d] /= n;
    break;
  }
  int64_t farthest = 0;
  for (int d = 0; d < plan.dims; ++d) {
    farthest += (plan.size[d] - 1) * plan.stride[d];
  }
  // A thread's next index may lie beyond the last one.
  constexpr int64_t kRoom = int64_t{1} << 20;
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max() - kRoom;
  plan.small = plan.count <= kMost && farthest <= kMost;
  return plan;
}

}  // namespace tapeline
