// Which operation waits for which.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dist/pipeline/operations.h"
#include "dist/pipeline/schedule.h"

namespace tapeline::internal {

// Of a complete schedule whose channels are in order.
class WaitGraph {
 public:
  WaitGraph(const Schedule& schedule, OvRelease release);

  // Operations each of which waits for the next, and the last for the first;
  // empty if there is no such cycle. `capacity` as in Limits.
  std::vector<int> cycle(const std::optional<int>& capacity) const;

  struct Place {
    int rank = 0, action = 0;
    friend bool operator==(const Place&, const Place&) = default;
  };
  Place place(int node) const;

 private:
  struct Node {
    const Operation* operation;
    int rank;
    int number = -1;  // of the message in its channel
  };
  // Of a channel, in its order: nodes.
  struct Channel {
    std::vector<int> sends, receives;
  };

  size_t key(const Value& value, int micro_batch) const;
  Channel& channel(const Node& node);
  const Channel& channel(const Node& node) const;
  bool first_of_rank(int node) const;
  template <class F>
  void for_each_wait(int node, const std::optional<int>& capacity,
                     const F& f) const;
  template <class F>
  void for_each_wait_of_run(const Node& node, const F& f) const;

  const Schedule& s_;
  std::vector<std::vector<Operation>> operations_;
  std::vector<Node> nodes_;
  std::vector<int> made_by_;  // value and micro-batch -> node
  std::vector<Channel> channels_;
};

}  // namespace tapeline::internal
