// Which of two ways top_k takes on CUDA; pure, so that tests can print it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ostream>

namespace tapeline::cuda {

// The radix kernel holds candidates, a histogram and a bitmap of the row in
// shared memory; a row that does not fit takes the plain kernel.
struct TopKPlan {
  bool radix = false;
  int threads = 0;
  int capacity = 0;         // candidates of one row in shared memory
  size_t shared_bytes = 0;  // of one block

  friend bool operator==(const TopKPlan&, const TopKPlan&) = default;
  friend std::ostream& operator<<(std::ostream& out, const TopKPlan& p) {
    if (!p.radix) return out << "plain";
    return out << "radix: " << p.threads << " threads, " << p.capacity
               << " candidates, " << p.shared_bytes << " bytes";
  }
};

inline constexpr int kTopKBins = 2048;  // 11 bits of a key at a time

inline size_t top_k_shared_bytes(int64_t keys, int capacity) {
  const auto words = static_cast<size_t>((keys + 31) / 32 + 1);
  return (static_cast<size_t>(capacity) * 2 + kTopKBins + words) * 4;
}

// A sample of the row bounds the k-th score from below, so that about 1.5 k
// keys become candidates; with room for 3 k, rows that need a second look are
// rare.
inline TopKPlan top_k_plan(bool f32, int64_t keys, int k) {
  constexpr size_t kMaxShared = 200 << 10;
  constexpr int64_t kMaxKeys = 1 << 20;
  if (!f32 || keys > kMaxKeys) return {};
  const int capacity = k <= 1024 ? 3072 : k <= 2048 ? 6144 : 12288;
  const size_t bytes = top_k_shared_bytes(keys, capacity);
  if (bytes > kMaxShared) return {};
  return {true, 512, capacity, bytes};
}

}  // namespace tapeline::cuda
