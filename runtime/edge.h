// The orderings that make copies beside compute safe, by name, so that a test
// can drop one and see that it is missed. In a program all hold, at the price
// of reading a constant byte.
#pragma once

#include <atomic>
#include <cstdint>

namespace tapeline {

enum class Edge : uint8_t {
  kNone,
  kBlockWaitsCopyOut,    // a block is reused after it was copied out
  kResidentIsNotLoaded,  // bytes that are still there are not copied back
  kUseWaitsLoad,         // a kernel starts after the load of what it reads
  kLoadWaitsBlock,       // a load starts after the block's last kernel
  kLoadWaitsCopyOut,     // a load starts after the bytes reached the host
  kSlotWaitsLoad,        // a pinned slot is rewritten after its load
  kSlotIsLeased,         // a pinned slot has one owner until it is loaded
};

// Set by tests alone; kNone: all hold.
inline std::atomic<Edge> dropped_edge = Edge::kNone;

inline bool holds(Edge edge) {
  return dropped_edge.load(std::memory_order_relaxed) != edge;
}

}  // namespace tapeline
