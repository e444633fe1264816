#include "dist/pipeline/memory.h"

#include "runtime/check.h"

namespace tapeline {
namespace {

// Sums of many small numbers must not drift above a limit that they equal.
constexpr double kSlack = 1e-9;

class Meter {
 public:
  void add(double amount, int index) {
    live_ += amount;
    if (live_ > peak_.value + kSlack) peak_ = {live_, index};
  }
  const Peak& peak() const { return peak_; }

 private:
  double live_ = 0;
  Peak peak_;
};

}  // namespace

std::vector<Peak> peaks(const Schedule& s, const std::vector<Holds>& holds) {
  CHECK(holds.size() == 1 || holds.size() == s.placement.size())
      << "[schedule] holds: " << holds.size() << " for " << s.stages()
      << " stages";
  std::vector<Peak> out;
  std::vector<bool> parked(size_t(s.stages()) * s.micro_batches);
  for (const std::vector<Action>& actions : s.ranks) {
    Meter meter;
    for (size_t i = 0; i < actions.size(); ++i) {
      const int index = static_cast<int>(i);
      for (const Pass& p : actions[i].passes()) {
        const Holds& h = holds[holds.size() == 1 ? 0 : p.stage];
        const size_t key = size_t(p.stage) * s.micro_batches + p.micro_batch;
        if (p.is_forward()) {
          parked[key] = p.recompute || p.offload;
          meter.add(parked[key] ? h.parked : h.forward, index);
        } else if (p.kind == PassKind::kWeight) {
          meter.add(-h.stash, index);
        } else {
          if (parked[key]) meter.add(h.forward - h.parked, index);
          meter.add(-h.forward, index);
          if (p.kind == PassKind::kInput) meter.add(h.stash, index);
        }
      }
    }
    out.push_back(meter.peak());
  }
  return out;
}

}  // namespace tapeline
