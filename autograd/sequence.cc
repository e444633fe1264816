#include "autograd/sequence.h"

#include "runtime/check.h"

namespace tapeline {

Sequence Sequence::packed(const std::vector<int32_t>& cu_seqlens) {
  CHECK(!cu_seqlens.empty() && cu_seqlens[0] == 0)
      << "[sequence] cu_seqlens starts with 0";
  std::vector<int32_t> begin, end, position;
  for (size_t s = 1; s < cu_seqlens.size(); ++s) {
    CHECK_LE(cu_seqlens[s - 1], cu_seqlens[s])
        << "[sequence] cu_seqlens decreases; ";
    for (int32_t t = cu_seqlens[s - 1]; t < cu_seqlens[s]; ++t) {
      begin.push_back(cu_seqlens[s - 1]);
      end.push_back(t + 1);
      position.push_back(t - cu_seqlens[s - 1]);
    }
  }
  const Shape shape = {cu_seqlens.back()};
  return {Tensor::from(begin, shape), Tensor::from(end, shape),
          Tensor::from(position, shape)};
}

Sequence Sequence::appended(int64_t cached, int64_t count) {
  CHECK(cached >= 0 && count >= 0)
      << "[sequence] " << count << " tokens after " << cached;
  std::vector<int32_t> begin, end, position;
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<int32_t>(cached + i);
    begin.push_back(0);
    end.push_back(at + 1);
    position.push_back(at);
  }
  return {Tensor::from(begin, {count}), Tensor::from(end, {count}),
          Tensor::from(position, {count})};
}

}  // namespace tapeline
