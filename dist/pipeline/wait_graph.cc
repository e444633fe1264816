#include "dist/pipeline/wait_graph.h"

#include <algorithm>

namespace tapeline::internal {
namespace {

size_t channel_index(const Value& value) {
  return 2 * size_t(value.stage) + (value.output ? 0 : 1);
}

}  // namespace

WaitGraph::WaitGraph(const Schedule& s, OvRelease release)
    : s_(s),
      operations_(operations(s, release)),
      made_by_(size_t{2} * s.stages() * s.micro_batches, -1),
      channels_(size_t{2} * s.stages()) {
  for (size_t r = 0; r < operations_.size(); ++r) {
    for (const Operation& o : operations_[r]) {
      const int id = static_cast<int>(nodes_.size());
      Node node{&o, static_cast<int>(r)};
      if (o.kind == Operation::kRun) {
        for (const Pass& p :
             s.ranks[r][o.action].passes().subspan(o.first, o.count)) {
          if (p.kind == PassKind::kWeight) continue;
          made_by_[key({p.is_forward(), p.stage}, p.micro_batch)] = id;
        }
      } else {
        Channel& c = channels_[channel_index(o.value)];
        std::vector<int>& ends =
            o.kind == Operation::kSend ? c.sends : c.receives;
        node.number = static_cast<int>(ends.size());
        ends.push_back(id);
      }
      nodes_.push_back(node);
    }
  }
}

size_t WaitGraph::key(const Value& value, int micro_batch) const {
  return channel_index(value) * s_.micro_batches + micro_batch;
}

WaitGraph::Place WaitGraph::place(int node) const {
  return {nodes_[node].rank, nodes_[node].operation->action};
}

bool WaitGraph::first_of_rank(int node) const {
  return node == 0 || nodes_[node - 1].rank != nodes_[node].rank;
}

template <class F>
void WaitGraph::for_each_wait_of_run(const Node& node, const F& f) const {
  const Operation& o = *node.operation;
  for (const Pass& p :
       s_.ranks[node.rank][o.action].passes().subspan(o.first, o.count)) {
    for (const Value& value : needs(p, s_.stages())) {
      const int maker = made_by_[key(value, p.micro_batch)];
      // Values from other ranks came with a receive.
      if (nodes_[maker].rank == node.rank) f(maker);
    }
  }
}

template <class F>
void WaitGraph::for_each_wait(int id, const std::optional<int>& capacity,
                              const F& f) const {
  const Node& node = nodes_[id];
  if (!first_of_rank(id)) f(id - 1);
  if (node.operation->kind == Operation::kRun) {
    for_each_wait_of_run(node, f);
    return;
  }
  const Channel& c = channels_[channel_index(node.operation->value)];
  // Sender and receiver meet once both are at this message: each waits for what
  // the other does before.
  const auto meet = [&](int other) {
    if (!first_of_rank(other)) f(other - 1);
  };
  if (node.operation->kind == Operation::kReceive) {
    if (capacity == 0) {
      meet(c.sends[node.number]);
    } else {
      f(c.sends[node.number]);
    }
  } else if (capacity == 0) {
    meet(c.receives[node.number]);
  } else if (capacity.has_value() && node.number >= *capacity) {
    f(c.receives[node.number - *capacity]);
  }
}

// Depth first, with a stack of our own: each entry waits for the one above.
std::vector<int> WaitGraph::cycle(const std::optional<int>& capacity) const {
  enum : uint8_t { kNew, kOpen, kDone };
  std::vector<uint8_t> state(nodes_.size(), kNew);
  std::vector<int> stack;
  for (int root = 0; root < static_cast<int>(nodes_.size()); ++root) {
    if (state[root] == kNew) stack.push_back(root);
    while (!stack.empty()) {
      const int top = stack.back();
      state[top] = kOpen;
      int next = -1, back = -1;
      for_each_wait(top, capacity, [&](int w) {
        if (state[w] == kNew) next = w;
        if (state[w] == kOpen) back = w;
      });
      if (back >= 0) {
        return {std::find(stack.begin(), stack.end(), back), stack.end()};
      }
      if (next >= 0) {
        stack.push_back(next);
      } else {
        state[top] = kDone;
        stack.pop_back();
      }
    }
  }
  return {};
}

}  // namespace tapeline::internal
