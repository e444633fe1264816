#include "dist/pipeline/operations.h"

namespace tapeline {
namespace {

class Lowering {
 public:
  Lowering(const Schedule& s, int rank) : s_(s), rank_(rank) {}

  void add(int action, int first, int count) {
    const std::span<const Pass> passes =
        s_.ranks[rank_][action].passes().subspan(first, count);
    for (const Pass& p : passes) {
      for (const Value& value : needs(p, s_.stages())) {
        message(Operation::kReceive, action, value, p, value.stage);
      }
    }
    out_.push_back({Operation::kRun, action, first, count});
    for (const Pass& p : passes) {
      const int next = p.stage + (p.is_forward() ? 1 : -1);
      if (p.kind == PassKind::kWeight || next < 0 || next == s_.stages()) {
        continue;
      }
      message(Operation::kSend, action, {p.is_forward(), p.stage}, p, next);
    }
  }
  std::vector<Operation> operations() && { return std::move(out_); }

 private:
  void message(Operation::Kind kind, int action, const Value& value,
               const Pass& p, int stage) {
    const int peer = s_.placement[stage];
    if (peer == rank_) return;
    out_.push_back({kind, action, 0, 0, value, p.micro_batch, peer});
  }

  const Schedule& s_;
  const int rank_;
  std::vector<Operation> out_;
};

}  // namespace

std::vector<std::vector<Operation>> operations(const Schedule& s,
                                               OvRelease release) {
  std::vector<std::vector<Operation>> out;
  for (int r = 0; r < static_cast<int>(s.ranks.size()); ++r) {
    Lowering lowering(s, r);
    for (int i = 0; i < static_cast<int>(s.ranks[r].size()); ++i) {
      const int count = static_cast<int>(s.ranks[r][i].passes().size());
      if (release == OvRelease::kEnd) {
        lowering.add(i, 0, count);
      } else {
        for (int k = 0; k < count; ++k) lowering.add(i, k, 1);
      }
    }
    out.push_back(std::move(lowering).operations());
  }
  return out;
}

std::vector<int> messages_sent(const Schedule& schedule) {
  std::vector<int> out;
  for (const auto& rank : operations(schedule, OvRelease::kEnd)) {
    int n = 0;
    for (const Operation& o : rank) n += o.kind == Operation::kSend ? 1 : 0;
    out.push_back(n);
  }
  return out;
}

}  // namespace tapeline
