#include "autograd/muon.h"

#include <algorithm>
#include <deque>

#include "kernels/muon/muon.h"
#include "runtime/access.h"
#include "runtime/check.h"

namespace tapeline {
namespace {

// Matrices worked on at a time, each with a workspace of its own.
constexpr size_t kInFlight = 16;
// Matrices of at most this many elements go one to a thread; larger ones get
// all threads, one matrix after the other.
constexpr int64_t kSmall = int64_t{1} << 18;

template <class A>
struct Job {
  View<A> param;
  View<const A> grad;
  View<A> momentum, update, workspace;
};

template <class A>
void run(Launch l, const MuonRule& rule, const UpdateStep& step,
         const Job<A>& job) {
  muon_momentum<A>(l, job.grad, job.momentum, rule.momentum, rule.nesterov,
                   job.update, step.gradient_scale, step.clip_1);
  muon_orthogonalize<A>(l, job.update, job.workspace, rule.iterations);
  const double scale =
      muon_scale(MuonScale::kMatchAdamW, job.param.size(0), job.param.size(1));
  const double lr = rule.lr_ratio * step.lr;
  muon_apply<A>(l, job.update, lr * scale, rule.weight_decay, lr, job.param,
                step.clip_1);
}

// At most kInFlight matrices.
template <class A>
void update_group(const MuonRule& rule, const UpdateStep& step,
                  std::span<const MuonMatrix> group) {
  int64_t elements = 0, largest = 0;
  for (const MuonMatrix& m : group) {
    elements += m.param.elements() + muon_workspace(m.param.shape());
    largest = std::max(largest, m.param.elements());
  }
  const Tensor workspace =
      Tensor::empty({elements}, dtype_of<A>(), Tag::kWorkspace);
  const Leased<A> space = write<A>(workspace);
  // Leases are taken here: they belong to this thread.
  Stream& stream = Device::current().compute();
  std::deque<Leased<A>> written;
  std::deque<Leased<const A>> read;
  std::vector<Job<A>> jobs;
  A* at = space.view().data;
  for (const MuonMatrix& m : group) {
    Job<A> job;
    m.param.storage()->bump_version();
    m.momentum.storage()->bump_version();
    job.param = written.emplace_back(m.param, stream).view();
    job.momentum = written.emplace_back(m.momentum, stream).view();
    job.grad = read.emplace_back(m.grad, stream).view();
    const int64_t extra = muon_workspace(m.param.shape());
    job.update = View<A>(at, m.param.shape());
    job.workspace = View<A>(at + m.param.elements(), {extra});
    at += m.param.elements() + extra;
    jobs.push_back(job);
  }
  const Launch l = launch();
  // A stream is one thread's.
  if (largest > kSmall || l.on_cuda()) {
    for (const Job<A>& job : jobs) run(l, rule, step, job);
    return;
  }
  l.threads->parallel_for(static_cast<int64_t>(jobs.size()), 1,
                          [&](int64_t begin, int64_t end) {
                            for (int64_t i = begin; i < end; ++i) {
                              run(l, rule, step, jobs[i]);
                            }
                          });
}

}  // namespace

std::vector<RowBlock> row_blocks(const std::vector<int64_t>& heights,
                                 int64_t rows) {
  std::vector<RowBlock> blocks;
  int64_t at = 0;
  while (at < rows) {
    const int64_t before = at;
    for (int64_t height : heights) {
      blocks.push_back({at, at + height});
      at += height;
    }
    CHECK(at > before && at <= rows)
        << "[muon] row blocks end at row " << at << " of " << rows;
  }
  return blocks;
}

void muon_update(const MuonRule& rule, const UpdateStep& step,
                 std::span<const MuonMatrix> matrices) {
  while (!matrices.empty()) {
    const auto group = matrices.first(std::min(matrices.size(), kInFlight));
    matrices = matrices.subspan(group.size());
    if (group.front().param.dtype() == DType::kF64) {
      update_group<double>(rule, step, group);
    } else {
      update_group<float>(rule, step, group);
    }
  }
}

}  // namespace tapeline
