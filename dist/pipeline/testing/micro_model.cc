#include "dist/pipeline/testing/micro_model.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "autograd/mode.h"
#include "autograd/ops.h"
#include "autograd/tape.h"
#include "dist/pipeline/lowering.h"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/parameter.h"

namespace tapeline {
namespace {

constexpr int kHeadSite = 1;

// Values that do not depend on who makes them.
std::vector<float> values(int64_t count, uint64_t key, float around) {
  std::vector<float> out;
  uint64_t x = key * 0x9E3779B97F4A7C15 + 1;
  for (int64_t i = 0; i < count; ++i) {
    x ^= x >> 29;
    x *= 0xBF58476D1CE4E5B9;
    x ^= x >> 32;
    out.push_back(around + 0.5f * (static_cast<float>(x % 2001) / 1000 - 1));
  }
  return out;
}

Parameter make_parameter(const std::string& name, const Shape& shape,
                         uint64_t key, float around) {
  Parameter p(shape);
  p.set_value(name, Tensor::from(values(shape.elements(), key, around), shape,
                                 Tag::kParameter));
  return p;
}

struct MicroWeights {
  Parameter embedding, head;  // one, if tied
  std::map<int, Parameter> norm, layer;

  // Those of the given stages.
  MicroWeights(const std::set<int>& owned, int stages, const MicroOptions& o) {
    const Shape table = {o.vocabulary, o.dim};
    if (owned.count(0) > 0 || (o.tied && owned.count(stages - 1) > 0)) {
      embedding = make_parameter("embedding", table, 1, 0);
    }
    if (owned.count(stages - 1) > 0) {
      head = o.tied ? embedding : make_parameter("head", table, 2, 0);
    }
    for (const int s : owned) {
      norm[s] = make_parameter(absl::StrCat("norm", s), {o.dim}, 10 + s, 1);
      layer[s] =
          make_parameter(absl::StrCat("layer", s), {o.dim, o.dim}, 100 + s, 0);
      if (o.frozen_layers && s > 0 && s + 1 < stages) {
        norm[s].set_trainable(false);
        layer[s].set_trainable(false);
      }
    }
  }

  void add_gradients(ParameterGradients& grads,
                     std::map<std::string, std::vector<float>>& out) const {
    const auto add = [&](const Parameter& p) {
      if (!p.defined() || !grads.reached(p)) return;
      out[p.name()] = grads.combined(p).to_vector<float>();
    };
    add(embedding);
    if (!head.defined() || head.key() != embedding.key()) add(head);
    for (const auto& [s, p] : norm) add(p);
    for (const auto& [s, p] : layer) add(p);
  }
};

int64_t length(int j, const MicroOptions& o) {
  return o.equal_lengths ? 5 : 1 + (j * 7 + 3) % 5;
}

Tensor ids(int j, const MicroOptions& o) {
  std::vector<int32_t> out;
  for (int64_t t = 0; t < length(j, o); ++t) {
    out.push_back(static_cast<int32_t>((j * 5 + t * 3) % o.vocabulary));
  }
  return Tensor::from(out, {length(j, o)});
}

Tensor embed(int j, const MicroWeights& w, const MicroOptions& o) {
  return embedding(ids(j, o), w.embedding);
}

Tensor run_layer(int s, const Tensor& x_TD, const MicroWeights& w,
                 const MicroOptions& o) {
  const Parameter& layer = w.layer.at(s);
  Tensor y_TD = linear(rms_norm(x_TD, w.norm.at(s), 1e-6), layer);
  if (o.shared_layers) y_TD = linear(y_TD, layer);
  y_TD = x_TD + y_TD;
  return attach(y_TD, sum(mul(y_TD, y_TD)), 0.01 * (s + 1));
}

Tensor head_loss(int j, const Tensor& x_TD, const MicroWeights& w,
                 const MicroOptions& o) {
  std::vector<int32_t> labels;
  std::vector<float> weights;
  for (int64_t t = 0; t < length(j, o); ++t) {
    // Micro-batch 1 has no label.
    const bool valid = j != 1 && t % 4 != 3;
    labels.push_back(valid ? static_cast<int32_t>((t * 2 + j) % o.vocabulary)
                           : -100);
    weights.push_back(valid ? 0.03f : 0);
  }
  UseSite site(kHeadSite);
  return linear_cross_entropy(x_TD, w.head,
                              Tensor::from(labels, {length(j, o)}),
                              Tensor::from(weights, {length(j, o)}))
      .loss;
}

class MicroStage : public Stage {
 public:
  MicroStage(int stage, int stages, const MicroWeights& w,
             const MicroOptions& o, std::vector<float>& losses,
             std::atomic<int64_t>& forwards)
      : stage_(stage),
        stages_(stages),
        w_(w),
        o_(o),
        losses_(losses),
        forwards_(forwards) {}

  std::vector<TensorSpec> inputs(int j) const override {
    std::vector<TensorSpec> out = between(stage_ - 1, j);
    if (o_.on_inputs) o_.on_inputs(stage_, out);
    return out;
  }
  std::vector<TensorSpec> outputs(int j) const override {
    return between(stage_, j);
  }

  absl::StatusOr<StageOutput> forward(const Pass& pass,
                                      const std::vector<Tensor>& in) override {
    const int j = pass.micro_batch;
    CHECK(under_way_.insert(j).second);
    ++forwards_;
    if (o_.on_forward) {
      const absl::Status status = o_.on_forward(stage_, j);
      if (!status.ok()) return status;
    }
    Tensor x_TD;
    if (stage_ == 0) {
      x_TD = embed(j, w_, o_);
    } else {
      x_TD = in[0];
      if (!o_.dry) {
        CHECK(in[1].to_vector<int32_t>() == mark(stage_ - 1, j))
            << "stage " << stage_ << " was given another message";
      }
    }
    x_TD = run_layer(stage_, x_TD, w_, o_);
    if (stage_ + 1 < stages_) {
      return StageOutput{{x_TD, Tensor::from(mark(stage_, j), {2})}, {}};
    }
    const Tensor loss = head_loss(j, x_TD, w_, o_);
    losses_[j] = loss.to_vector<float>()[0];
    return StageOutput{{}, loss};
  }
  void end(int micro_batch, bool) override {
    CHECK_EQ(under_way_.erase(micro_batch), size_t{1});
  }
  int64_t under_way() const { return static_cast<int64_t>(under_way_.size()); }

 private:
  static std::vector<int32_t> mark(int stage, int j) { return {stage, j}; }
  // What stage s hands on.
  std::vector<TensorSpec> between(int s, int j) const {
    if (s < 0 || s + 1 >= stages_) return {};
    return {{DType::kF32, {length(j, o_), o_.dim}}, {DType::kI32, {2}}};
  }

  const int stage_, stages_;
  const MicroWeights& w_;
  const MicroOptions& o_;
  std::vector<float>& losses_;
  std::atomic<int64_t>& forwards_;
  std::set<int> under_way_;
};

}  // namespace

Schedule with_tied_ends(Schedule schedule) {
  if (schedule.stages() > 1) {
    schedule.groups.push_back({"tied", {0, schedule.stages() - 1}});
  }
  return schedule;
}

MicroResult micro_loop(int stages, int micro_batches, const MicroOptions& o) {
  Device device(1);
  const DeviceScope scope(device);
  device.pool().set_poison(o.poison);
  MicroResult out;
  {
    std::set<int> all;
    for (int s = 0; s < stages; ++s) all.insert(s);
    const MicroWeights w(all, stages, o);
    ParameterGradients grads;
    for (int j = 0; j < micro_batches; ++j) {
      auto [loss, tape] = record([&] {
        Tensor x_TD = embed(j, w, o);
        for (int s = 0; s < stages; ++s) x_TD = run_layer(s, x_TD, w, o);
        return head_loss(j, x_TD, w, o);
      });
      out.losses.push_back(loss.to_vector<float>()[0]);
      tape.backward(loss, grads);
    }
    w.add_gradients(grads, out.gradients);
  }
  return out;
}

namespace {

MicroResult empty_result(const Schedule& schedule) {
  const size_t ranks = schedule.ranks.size();
  MicroResult out;
  out.losses.assign(schedule.micro_batches, 0);
  out.status.resize(ranks);
  out.counters.resize(ranks);
  out.peak_activations.resize(ranks);
  out.live_after.resize(ranks);
  out.stages_begun_not_ended.resize(ranks);
  return out;
}

// Runs one rank on the calling thread and writes down what it made.
void run_rank(const Schedule& schedule,
              const std::vector<RankProgram>& programs,
              Communicator& communicator, const MicroOptions& o,
              std::atomic<int64_t>& forwards, std::mutex& mutex,
              MicroResult& out) {
  const int rank = communicator.rank(), stages = schedule.stages();
  Device device(1, {}, o.dry);
  const DeviceScope scope(device);
  device.pool().set_poison(o.poison && !o.dry);
  std::set<int> owned;
  for (int s = 0; s < stages; ++s) {
    if (schedule.placement[s] == rank) owned.insert(s);
  }
  const MicroWeights weights(owned, stages, o);
  std::map<int, std::unique_ptr<MicroStage>> made;
  std::map<int, Stage*> all;
  for (const int s : owned) {
    made[s] = std::make_unique<MicroStage>(s, stages, weights, o, out.losses,
                                           forwards);
    all[s] = made[s].get();
  }
  ExecutorOptions options = o.executor;
  for (size_t g = 0; g < schedule.groups.size(); ++g) {
    options.replicas.push_back({weights.embedding, {{0}, {kHeadSite}}});
  }
  ParameterGradients grads;
  Executor executor(schedule, programs, communicator, all, options);
  const auto live = [&] {
    return device.pool()
        .stats()
        .live_bytes[static_cast<size_t>(Tag::kActivation)];
  };
  const int64_t before = live();
  for (int step = 0; step < o.steps && out.status[rank].ok(); ++step) {
    grads.zero();
    device.pool().reset_peak();
    out.status[rank] = executor.step(grads);
  }
  out.live_after[rank] = live() - before;
  out.peak_activations[rank] =
      device.pool().stats().peak_bytes[static_cast<size_t>(Tag::kActivation)] -
      before;
  out.counters[rank] = executor.counters();
  for (const auto& [s, stage] : made) {
    out.stages_begun_not_ended[rank] += stage->under_way();
  }
  const std::lock_guard lock(mutex);
  if (o.dry) return;
  std::map<std::string, std::vector<float>> mine;
  weights.add_gradients(grads, mine);
  for (auto& [name, gradient] : mine) {
    // Replicas of the tied weights have the same sum.
    const auto [at, fresh] = out.gradients.emplace(name, gradient);
    CHECK(fresh || at->second == gradient) << name << " differs by rank";
  }
}

std::vector<RankProgram> programs_of(const Schedule& schedule) {
  absl::StatusOr<std::vector<RankProgram>> programs = lower(schedule);
  CHECK(programs.ok()) << programs.status().message();
  return *std::move(programs);
}

}  // namespace

MicroResult micro_pipeline(const Schedule& schedule, const MicroOptions& o) {
  const std::vector<RankProgram> programs = programs_of(schedule);
  const int ranks = static_cast<int>(schedule.ranks.size());
  ThreadGroup group(ranks, o.threads);
  MicroResult out = empty_result(schedule);
  std::mutex mutex;
  std::atomic<int64_t> forwards = 0;
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      run_rank(schedule, programs, group.rank(r), o, forwards, mutex, out);
    });
  }
  for (std::thread& thread : threads) thread.join();
  out.forwards = forwards;
  return out;
}

MicroResult micro_rank(const Schedule& schedule, Communicator& communicator,
                       const MicroOptions& o) {
  MicroResult out = empty_result(schedule);
  std::mutex mutex;
  std::atomic<int64_t> forwards = 0;
  run_rank(schedule, programs_of(schedule), communicator, o, forwards, mutex,
           out);
  out.forwards = forwards;
  return out;
}

std::string difference(const MicroResult& got, const MicroResult& want) {
  for (size_t r = 0; r < got.status.size(); ++r) {
    if (!got.status[r].ok()) return std::string(got.status[r].message());
  }
  if (got.losses != want.losses) return "losses";
  for (const auto& [name, gradient] : want.gradients) {
    const auto found = got.gradients.find(name);
    if (found == got.gradients.end()) return name + " is missing";
    if (found->second != gradient) return name;
  }
  if (got.gradients.size() != want.gradients.size()) return "more gradients";
  return "";
}

}  // namespace tapeline
