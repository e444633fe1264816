#include "dist/pipeline/executor.h"

#include <algorithm>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/elementwise/elementwise.h"
#include "runtime/access.h"
#include "runtime/check.h"
#include "runtime/device.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

TensorSpec spec_of(const Tensor& x) { return {x.dtype(), x.shape()}; }

std::vector<TensorSpec> specs_of(const std::vector<Tensor>& tensors) {
  std::vector<TensorSpec> specs;
  for (const Tensor& x : tensors) specs.push_back(spec_of(x));
  return specs;
}

// Those that have gradients.
std::vector<TensorSpec> floats(const std::vector<TensorSpec>& specs) {
  std::vector<TensorSpec> out;
  for (const TensorSpec& spec : specs) {
    if (is_float(spec.dtype)) out.push_back(spec);
  }
  return out;
}

// Where x lies on its tape, for a seed, without x's bytes.
Tensor position_of(const Tensor& x) {
  Tensor out = Tensor::zeros(Shape{}, x.dtype());
  for (int i = x.rank() - 1; i >= 0; --i) out = out.broadcast_dim(0, x.size(i));
  out.requires_grad = x.requires_grad;
  out.tape = x.tape;
  out.slot = x.slot;
  return out;
}

void copy_values(const Tensor& from, const Tensor& to) {
  CHECK(from.shape() == to.shape() && from.dtype() == to.dtype());
  if (from.storage()->device().dry()) return;
  dispatch_float(from.dtype(), [&]<class T>() {
    copy<T>(launch(), read<T>(from), write<T>(to));
  });
}

}  // namespace

Executor::Executor(const Schedule& schedule,
                   const std::vector<RankProgram>& programs,
                   Communicator& communicator, std::map<int, Stage*> stages,
                   ExecutorOptions options)
    : s_(schedule),
      programs_(programs),
      communicator_(communicator),
      stages_(std::move(stages)),
      options_(std::move(options)) {
  CHECK_EQ(static_cast<size_t>(communicator.size()), schedule.ranks.size());
  CHECK_EQ(programs.size(), schedule.ranks.size());
  CHECK(schedule.groups.size() == options_.replicas.size())
      << "[executor] " << schedule.groups.size() << " replica groups, weights "
      << "for " << options_.replicas.size();
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    CHECK_EQ(stages_.count(stage) > 0,
             schedule.placement[stage] == communicator.rank())
        << "[executor] stage " << stage << " and rank " << communicator.rank();
  }
}

absl::Status Executor::step(ParameterGradients& grads) {
  counters_ = {};
  marks_.clear();
  arriving_.clear();
  ran_.clear();
  begun_ = marks_.mark(Device::current().compute());
  communicator_.time_messages(&marks_);
  const absl::Status status = run(grads);
  communicator_.time_messages(nullptr);
  if (status.ok()) return status;
  const std::vector<Instruction>& mine =
      programs_[communicator_.rank()].instructions;
  const auto& actions = s_.ranks[communicator_.rank()];
  std::string where = absl::StrCat("rank ", communicator_.rank());
  if (at_ < mine.size()) {
    const auto action = static_cast<size_t>(mine[at_].action);
    absl::StrAppend(&where, ", action ", action, " (",
                    action < actions.size() ? to_string(actions[action])
                                            : std::string("end"),
                    "), ", to_string(mine[at_]));
  }
  const absl::Status whole(status.code(),
                           absl::StrCat(where, ": ", status.message()));
  communicator_.abort(whole);
  clear();
  grads.zero();
  return whole;
}

absl::Status Executor::run(ParameterGradients& grads) {
  const std::vector<Instruction>& mine =
      programs_[communicator_.rank()].instructions;
  for (at_ = 0; at_ < mine.size(); ++at_) {
    communicator_.set_position(static_cast<int64_t>(2 * at_));
    retire_sends();
    RETURN_IF_ERROR(execute(mine[at_], grads));
  }
  communicator_.set_position(static_cast<int64_t>(2 * at_));
  for (const Ticket ticket : std::exchange(sending_, {})) {
    RETURN_IF_ERROR(wait(ticket).status());
  }
  CHECK(kept_.empty() && values_.empty() && asked_.empty())
      << "[executor] rank " << communicator_.rank() << " has values left";
  return absl::OkStatus();
}

absl::Status Executor::execute(const Instruction& i,
                               ParameterGradients& grads) {
  switch (i.kind) {
    case Instruction::kAsk:
      return ask(i);
    case Instruction::kTake:
      return take(i);
    case Instruction::kRun: {
      const Stream& stream = Device::current().compute();
      await_inputs(i.pass);
      const size_t begin = marks_.mark(stream);
      RETURN_IF_ERROR(i.pass.is_forward() ? run_forward(i.pass)
                                          : run_backward(i.pass, grads));
      PassTime& time = counters_.passes[{i.pass.stage, i.pass.kind}];
      ++time.passes;
      if (i.pass.recompute) ++time.recomputed;
      ran_.push_back({i.pass.stage, i.pass.kind, begin, marks_.mark(stream),
                      std::exchange(arriving_, {})});
      return absl::OkStatus();
    }
    case Instruction::kHand:
      // The value lies where the other stage looks for it.
      ++counters_.handed;
      return absl::OkStatus();
    case Instruction::kSend:
      return send(i);
    case Instruction::kFree: {
      const auto kept = kept_.find({i.stage, i.micro_batch});
      counters_.nodes_left += kept->second->tape.nodes();
      kept_.erase(kept);
      stages_.at(i.stage)->end(i.micro_batch, /*complete=*/true);
      return absl::OkStatus();
    }
    case Instruction::kReduce:
      ++counters_.reductions;
      return options_.reduce ? options_.reduce(i.stage) : absl::OkStatus();
    case Instruction::kOffer:
      return offer(i, grads);
    case Instruction::kCollect:
      return collect(i, grads);
  }
  return absl::OkStatus();
}

// The device's stream waits for what the pass was handed, so that the pass's
// own time is apart from that.
void Executor::await_inputs(const Pass& pass) {
  if (pass.kind == PassKind::kWeight) return;
  const int neighbour = pass.stage + (pass.is_forward() ? -1 : 1);
  const auto given =
      values_.find(ValueKey(pass.is_forward(), neighbour, pass.micro_batch));
  if (given == values_.end()) return;
  Stream& stream = Device::current().compute();
  for (const Tensor& part : given->second) {
    if (!part) continue;
    part.storage()->acquire(stream);
    part.storage()->release(stream, /*wrote=*/false);
  }
}

const ExecutorCounters& Executor::times() {
  double last = marks_.ms(begun_), exposed = 0;
  bool timed = false;
  for (const Ran& pass : std::exchange(ran_, {})) {
    const double begin = marks_.ms(pass.begin), end = marks_.ms(pass.end);
    counters_.passes[{pass.stage, pass.kind}].seconds += 1e-3 * (end - begin);
    for (const Travel& travel : pass.travels) {
      timed = true;
      // Of two that travel together the time counts once.
      const double left = std::max(last, marks_.ms(travel.begin));
      const double right = std::min(begin, marks_.ms(travel.end));
      exposed += std::max(0.0, right - left);
      last = std::max(last, right);
    }
    last = end;
    counters_.seconds = 1e-3 * (last - marks_.ms(begun_));
  }
  if (timed) counters_.exposed_seconds = 1e-3 * exposed;
  return counters_;
}

// What a message of `value`, which `stage` uses, is made of.
std::vector<TensorSpec> Executor::specs(const Value& value, int stage,
                                        int micro_batch) const {
  const Stage& user = *stages_.at(stage);
  return value.output ? user.inputs(micro_batch)
                      : floats(user.outputs(micro_batch));
}

absl::Status Executor::ask(const Instruction& i) {
  ASSIGN_OR_RETURN(
      asked_[ValueKey(i.value.output, i.value.stage, i.micro_batch)],
      communicator_.receive({i.peer, channel_of(i.value), i.micro_batch},
                            i.slot, specs(i.value, i.stage, i.micro_batch)));
  counters_.most_slots =
      std::max(counters_.most_slots, static_cast<int64_t>(asked_.size()));
  return absl::OkStatus();
}

absl::Status Executor::take(const Instruction& i) {
  const ValueKey key(i.value.output, i.value.stage, i.micro_batch);
  const auto asked = asked_.find(key);
  CHECK(asked != asked_.end());
  ASSIGN_OR_RETURN(values_[key], wait(asked->second));
  if (const auto travel = communicator_.travel()) arriving_.push_back(*travel);
  asked_.erase(asked);
  ++counters_.received;
  return absl::OkStatus();
}

absl::Status Executor::send(const Instruction& i) {
  const auto value =
      values_.find(ValueKey(i.value.output, i.value.stage, i.micro_batch));
  CHECK(value != values_.end());
  std::vector<Tensor> parts = std::move(value->second);
  values_.erase(value);
  // A gradient's parts are those of the floats that this stage was given.
  const Stage& maker = *stages_.at(i.value.stage);
  const std::vector<TensorSpec> specs =
      i.value.output ? specs_of(parts) : floats(maker.inputs(i.micro_batch));
  for (const Tensor& part : parts) {
    if (part) counters_.sent_bytes += part.bytes();
  }
  ASSIGN_OR_RETURN(
      const Ticket ticket,
      communicator_.send({i.peer, channel_of(i.value), i.micro_batch}, specs,
                         std::move(parts)));
  ++counters_.sent;
  if (communicator_.sends_wait()) return wait(ticket).status();
  sending_.push_back(ticket);
  counters_.most_sending =
      std::max(counters_.most_sending, static_cast<int64_t>(sending_.size()));
  return absl::OkStatus();
}

absl::Status Executor::run_forward(const Pass& pass) {
  const int stage = pass.stage, j = pass.micro_batch;
  std::vector<Tensor> given;
  if (stage > 0) {
    const auto value = values_.find(ValueKey(true, stage - 1, j));
    CHECK(value != values_.end());
    given = std::move(value->second);
    values_.erase(value);
  }
  auto kept = std::make_unique<Kept>(absl::StrCat(stage, ".", j));
  kept->parked = pass.recompute || pass.offload;
  for (Tensor& x : given) {
    x = is_float(x.dtype()) ? kept->tape.input(x) : x.detach();
  }
  absl::StatusOr<StageOutput> made = record(
      kept->tape, [&] { return stages_.at(stage)->forward(pass, given); });
  given.clear();
  if (!made.ok()) {
    kept->tape = Tape();
    stages_.at(stage)->end(j, /*complete=*/false);
    return made.status();
  }
  const std::vector<TensorSpec> promised = stages_.at(stage)->outputs(j);
  CHECK(specs_of(made->outputs) == promised)
      << "[executor] stage " << stage << " made "
      << to_string(specs_of(made->outputs)) << ", not " << to_string(promised);
  for (Tensor& x : made->outputs) {
    if (is_float(x.dtype())) kept->outputs.push_back(position_of(x));
    if (!x.contiguous()) x = x.clone();
    x = x.detach();
  }
  if (made->loss) kept->loss = position_of(made->loss);
  if (stage + 1 < s_.stages()) {
    values_[ValueKey(true, stage, j)] = std::move(made->outputs);
  }
  ++counters_.forwards;
  if (!kept->parked) note_kept(1);
  const bool fresh = kept_.emplace(Key(stage, j), std::move(kept)).second;
  CHECK(fresh) << "[executor] " << to_string(pass) << " again";
  return absl::OkStatus();
}

absl::Status Executor::run_backward(const Pass& pass,
                                    ParameterGradients& grads) {
  const int stage = pass.stage, j = pass.micro_batch;
  const auto found = kept_.find(Key(stage, j));
  CHECK(found != kept_.end());
  Kept& kept = *found->second;
  if (pass.kind == PassKind::kWeight) {
    kept.tape.backward_weights(grads);
    ++counters_.weights;
    note_kept(-1);
    return absl::OkStatus();
  }
  std::vector<Seed> seeds;
  if (stage + 1 < s_.stages()) {
    const auto value = values_.find(ValueKey(false, stage + 1, j));
    CHECK(value != values_.end());
    const std::vector<Tensor> given = std::move(value->second);
    values_.erase(value);
    CHECK_EQ(given.size(), kept.outputs.size());
    for (size_t i = 0; i < given.size(); ++i) {
      // Nothing flowed into it, or nobody before it wants a gradient.
      if (!given[i] || !kept.outputs[i].requires_grad) continue;
      seeds.push_back({kept.outputs[i], given[i]});
    }
  }
  if (kept.loss && kept.loss.requires_grad) {
    seeds.push_back(
        {kept.loss, Tensor::full(kept.loss.shape(), kept.loss.dtype(), 1)});
  }
  kept.outputs.clear();
  kept.loss = Tensor();
  if (kept.parked) note_kept(1);
  std::vector<Tensor> gradients = pass.kind == PassKind::kBackward
                                      ? kept.tape.backward(seeds, grads)
                                      : kept.tape.backward_inputs(seeds, grads);
  seeds.clear();
  if (stage > 0) {
    values_[ValueKey(false, stage, j)] = std::move(gradients);
  }
  if (pass.kind == PassKind::kBackward) {
    ++counters_.backwards;
    note_kept(-1);
  } else {
    ++counters_.inputs;
  }
  return absl::OkStatus();
}

absl::Status Executor::offer(const Instruction& i, ParameterGradients& grads) {
  const ReplicaWeights& weights = options_.replicas[i.group];
  const std::vector<int>& stages = s_.groups[i.group].stages;
  std::map<int, std::vector<int>> sites;  // by rank
  for (size_t k = 0; k < stages.size(); ++k) {
    std::vector<int>& of = sites[s_.placement[stages[k]]];
    of.insert(of.end(), weights.sites[k].begin(), weights.sites[k].end());
  }
  const int me = communicator_.rank();
  const int channel = group_channel(s_, i.group);
  const Tensor& value = weights.parameter.value();
  const TensorSpec spec = {accumulator_dtype(value.dtype()), value.shape()};
  for (const auto& [peer, theirs] : sites) {
    if (peer == me) continue;
    std::vector<Tensor> sums;
    for (const int site : sites[me]) {
      sums.push_back(grads.accumulator(weights.parameter, site));
    }
    const std::vector<TensorSpec> mine(sums.size(), spec);
    ASSIGN_OR_RETURN(
        const Ticket ticket,
        communicator_.send({peer, channel, 0}, mine, std::move(sums)));
    sending_.push_back(ticket);
    // Behind the slots of stages.
    const int slot = programs_[me].slots + static_cast<int>(collecting_.size());
    ASSIGN_OR_RETURN(
        (collecting_[{i.group, peer}]),
        communicator_.receive({peer, channel, 0}, slot,
                              std::vector<TensorSpec>(theirs.size(), spec)));
  }
  ++counters_.offers;
  return absl::OkStatus();
}

absl::Status Executor::collect(const Instruction& i,
                               ParameterGradients& grads) {
  const ReplicaWeights& weights = options_.replicas[i.group];
  const std::vector<int>& stages = s_.groups[i.group].stages;
  for (auto at = collecting_.lower_bound({i.group, 0});
       at != collecting_.end() && at->first.first == i.group;
       at = collecting_.erase(at)) {
    const int peer = at->first.second;
    ASSIGN_OR_RETURN(const std::vector<Tensor> sums, wait(at->second));
    size_t next = 0;
    for (size_t k = 0; k < stages.size(); ++k) {
      if (s_.placement[stages[k]] != peer) continue;
      for (const int site : weights.sites[k]) {
        copy_values(sums[next++], grads.accumulator(weights.parameter, site));
      }
    }
  }
  ++counters_.collects;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Tensor>> Executor::wait(Ticket ticket) {
  const absl::Time begin = absl::Now(), end = begin + options_.deadline;
  communicator_.set_position(static_cast<int64_t>(2 * at_ + 1));
  for (;;) {
    absl::StatusOr<std::vector<Tensor>> parts = communicator_.wait(
        ticket, std::clamp(end - absl::Now(), absl::ZeroDuration(),
                           options_.warn_after));
    const absl::Duration waited = absl::Now() - begin;
    if (!absl::IsDeadlineExceeded(parts.status())) {
      communicator_.set_position(static_cast<int64_t>(2 * at_));
      counters_.waited_seconds += absl::ToDoubleSeconds(waited);
      return parts;
    }
    const std::string report = absl::StrCat(
        parts.status().message(), " after ",
        absl::FormatDuration(absl::Trunc(waited, absl::Milliseconds(1))), "\n",
        positions());
    // A timeout may end a little early.
    if (waited + absl::Milliseconds(1) >= options_.deadline) {
      return absl::DeadlineExceededError(report);
    }
    if (options_.warn) {
      options_.warn(report);
    } else {
      std::cerr << report << std::flush;
    }
  }
}

void Executor::retire_sends() {
  std::vector<Ticket> left;
  for (const Ticket ticket : sending_) {
    if (communicator_.done(ticket)) {
      // An error comes back with the next call.
      if (!communicator_.wait(ticket, absl::ZeroDuration()).ok()) {
        left.push_back(ticket);
      }
    } else {
      left.push_back(ticket);
    }
  }
  sending_ = std::move(left);
}

void Executor::note_kept(int more) {
  live_ += more;
  counters_.most_kept = std::max(counters_.most_kept, live_);
}

void Executor::clear() {
  for (const auto& [key, kept] : kept_) {
    const auto [stage, micro_batch] = key;
    kept->tape = Tape();
    stages_.at(stage)->end(micro_batch, /*complete=*/false);
  }
  kept_.clear();
  values_.clear();
  asked_.clear();
  sending_.clear();
  collecting_.clear();
  live_ = 0;
}

std::string Executor::positions() const {
  const std::vector<int64_t> at = communicator_.positions();
  std::string out;
  for (size_t r = 0; r < at.size(); ++r) {
    absl::StrAppend(&out, "rank ", r, ": ");
    const std::vector<Instruction>& all = programs_[r].instructions;
    const auto i = static_cast<size_t>(at[r] / 2);
    if (at[r] < 0) {
      absl::StrAppend(&out, "not known\n");
    } else if (i >= all.size()) {
      absl::StrAppend(&out, "at the end\n");
    } else {
      const auto action = static_cast<size_t>(all[i].action);
      absl::StrAppend(&out, "action ", action, " of ", s_.ranks[r].size());
      if (action < s_.ranks[r].size()) {
        absl::StrAppend(&out, " (", to_string(s_.ranks[r][action]), ")");
      }
      absl::StrAppend(&out, at[r] % 2 == 1 ? ", waits to " : ", in ",
                      to_string(all[i]), "\n");
    }
  }
  return out;
}

}  // namespace tapeline
