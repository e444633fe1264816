#include "tools/train/pipeline_job.h"

#include <unistd.h>

#include <algorithm>
#include <deque>
#include <map>
#include <numbers>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "dist/all_gather.h"
#include "models/pipeline_stage.h"
#include "runtime/check.h"
#include "runtime/file.h"
#include "runtime/hash.h"
#include "runtime/json.h"
#include "runtime/safetensors.h"
#include "runtime/status.h"
#include "tools/train/exit_code.h"
#include "tools/train/export.h"
#include "tools/train/host_tensors.h"

namespace tapeline {
namespace {

// Behind the slots of stages, groups and reductions.
constexpr int kGatherSlot = (1 << 23) + 1;
// Elements of a message for a hash, but for larger tensors.
constexpr int64_t kMostHashed = int64_t{1} << 24;
// Batches of an evaluation in each replica between questions for a signal.
constexpr int64_t kUninterrupted = 8;
// Messages under way: a rank that is ahead waits.
constexpr size_t kMostSending = 4;

std::string encode(const absl::Status& status) {
  if (status.ok()) return "";
  return absl::StrCat(static_cast<int>(status.code()), " ",
                      static_cast<int>(exit_code(status)), " ",
                      status.message());
}

absl::Status decode(const std::string& text) {
  const size_t first = text.find(' '), second = text.find(' ', first + 1);
  int code = 0, exit = 0;
  CHECK(second != std::string::npos &&
        absl::SimpleAtoi(text.substr(0, first), &code) &&
        absl::SimpleAtoi(text.substr(first + 1, second - first - 1), &exit));
  return ending(static_cast<ExitCode>(exit),
                absl::Status(static_cast<absl::StatusCode>(code),
                             text.substr(second + 1)));
}

std::vector<float> f32_values(const Tensor& x) {
  std::vector<float> out;
  dispatch_float(x.dtype(), [&]<class T>() {
    const std::vector<T> values = x.to_vector<T>();
    out.assign(values.begin(), values.end());
  });
  return out;
}

// Messages that were sent and may not have left.
class Sending {
 public:
  Sending(Communicator& communicator, absl::Duration deadline)
      : communicator_(communicator), deadline_(deadline) {}
  absl::Status send(const Envelope& to, std::vector<Tensor> parts) {
    std::vector<TensorSpec> specs;
    for (const Tensor& x : parts) specs.push_back({x.dtype(), x.shape()});
    ASSIGN_OR_RETURN(tickets_.emplace_back(),
                     communicator_.send(to, specs, std::move(parts)));
    return leave(kMostSending);
  }
  // Until at most `most` are under way.
  absl::Status leave(size_t most) {
    while (tickets_.size() > most) {
      RETURN_IF_ERROR(communicator_.wait(tickets_.front(), deadline_).status());
      tickets_.pop_front();
    }
    return absl::OkStatus();
  }

 private:
  Communicator& communicator_;
  const absl::Duration deadline_;
  std::deque<Communicator::Ticket> tickets_;
};

}  // namespace

PipelineJob::PipelineJob(PipelinePlan plan, LanguageModel& model,
                         std::unique_ptr<Communicator> communicator,
                         absl::Duration deadline)
    : plan_(std::move(plan)),
      model_(model),
      deadline_(deadline),
      all_(std::move(communicator)),
      place_(place_of(plan_.mesh, all_->rank())),
      pipeline_(*all_, group_of(plan_.mesh, all_->rank(), {Axis::kPipeline})),
      replicas_(*all_, group_of(plan_.mesh, all_->rank(), {Axis::kData})) {}

absl::Status PipelineJob::lost(absl::Status status) {
  if (!status.ok()) all_->abort(status);
  return ending(kExitCommunication, std::move(status));
}

std::vector<NamedTensor> PipelineJob::tensors() const {
  std::vector<NamedTensor> out;
  std::map<std::string, bool> seen;
  for (int stage = 0; stage < plan_.stages(); ++stage) {
    if (plan_.schedule.placement[stage] != stage_rank()) continue;
    for (NamedTensor& t : model_.stage_tensors(plan_.layout, stage)) {
      if (seen.emplace(t.name, true).second) out.push_back(std::move(t));
    }
  }
  return out;
}

absl::StatusOr<std::vector<std::string>> PipelineJob::tell(
    const std::string& what, const std::string& mine) {
  absl::StatusOr<std::vector<std::string>> all =
      all_gather(*all_, what, mine, deadline_);
  if (!all.ok()) return lost(all.status());
  return all;
}

absl::Status PipelineJob::agree(const absl::Status& mine) {
  return agree_on_step(mine, /*signal=*/0).status();
}

absl::StatusOr<int> PipelineJob::agree_on_step(const absl::Status& mine,
                                               int signal) {
  // An error begins with its number, a signal with a letter.
  const std::string said = !mine.ok()    ? encode(mine)
                           : signal != 0 ? absl::StrCat("s", signal)
                                         : "";
  ASSIGN_OR_RETURN(const std::vector<std::string> all, tell("errors", said));
  if (!mine.ok()) return mine;
  int found = 0;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty()) continue;
    if (all[r][0] == 's') {
      CHECK(absl::SimpleAtoi(all[r].substr(1), &found));
      continue;
    }
    const absl::Status first = decode(all[r]);
    return ending(exit_code(first),
                  absl::Status(first.code(), absl::StrCat("rank ", r, ": ",
                                                          first.message())));
  }
  return found;
}

absl::StatusOr<std::string> PipelineJob::from_leader(
    const absl::StatusOr<std::string>& mine) {
  RETURN_IF_ERROR(agree(leader() ? mine.status() : absl::OkStatus()));
  ASSIGN_OR_RETURN(const std::vector<std::string> all,
                   tell("what rank 0 found", leader() ? *mine : ""));
  return all[0];
}

absl::StatusOr<uint64_t> PipelineJob::sum(const std::string& what,
                                          uint64_t mine) {
  ASSIGN_OR_RETURN(const std::vector<std::string> all,
                   tell(what, absl::StrCat(mine)));
  uint64_t out = 0;
  for (const std::string& text : all) {
    uint64_t n = 0;
    CHECK(absl::SimpleAtoi(text, &n));
    out += n;
  }
  return out;
}

absl::StatusOr<Evaluation> PipelineJob::evaluate(
    const EvalBatches& batches, const std::vector<LanguageModelStage*>& stages,
    int (*signal)(), int* stopped_by) {
  std::vector<double> nats(static_cast<size_t>(batches.size()), 0);
  const std::vector<int>& placement = plan_.schedule.placement;
  Evaluation out;
  const auto run = [&]() -> absl::Status {
    Sending sending(pipeline_, deadline_);
    for (int64_t i = 0; i < batches.size(); ++i) {
      if (i > 0 && i % (kUninterrupted * replicas_.size()) == 0) {
        RETURN_IF_ERROR(sending.leave(0));
        ASSIGN_OR_RETURN(*stopped_by, agree_on_step({}, signal()));
        if (*stopped_by != 0) return absl::OkStatus();
      }
      MicroBatch mb = batches.get(i);
      out.bytes += mb.valid_labels();
      out.tokens += mb.tokens();
      if (i % replicas_.size() != replica()) continue;
      const HostBatch host{std::move(mb.ids), std::move(mb.labels),
                           std::move(mb.cu_seqlens)};
      std::vector<Tensor> state;  // what the stage before left on this rank
      for (int s = 0; s < plan_.stages(); ++s) {
        if (placement[s] != stage_rank()) continue;
        if (s > 0 && placement[s - 1] != stage_rank()) {
          const auto tokens = static_cast<int64_t>(host.ids.size());
          ASSIGN_OR_RETURN(
              const Communicator::Ticket ticket,
              pipeline_.receive({placement[s - 1], channel_of({true, s - 1}),
                                 static_cast<int>(i)},
                                kGatherSlot,
                                stages[s]->evaluation_inputs(tokens)));
          ASSIGN_OR_RETURN(state, pipeline_.wait(ticket, deadline_));
        }
        StageOutput made = stages[s]->evaluate(host, state);
        if (made.loss) nats[static_cast<size_t>(i)] = scalar_value(made.loss);
        state = std::move(made.outputs);
        const bool leaves =
            s + 1 < plan_.stages() && placement[s + 1] != stage_rank();
        if (!leaves) continue;
        for (Tensor& x : state) {
          if (!x.contiguous()) x = x.clone();
        }
        RETURN_IF_ERROR(sending.send(
            {placement[s + 1], channel_of({true, s}), static_cast<int>(i)},
            std::move(state)));
        state.clear();
      }
    }
    RETURN_IF_ERROR(sending.leave(0));
    return all_reduce(*all_, "evaluation", nats, deadline_);
  };
  if (const absl::Status status = run(); !status.ok()) return lost(status);
  if (*stopped_by != 0) return Evaluation();
  double sum = 0;
  for (const double x : nats) sum += x;
  if (out.bytes > 0) {
    out.loss = sum / static_cast<double>(out.bytes);
    out.bits_per_byte = out.loss / std::numbers::ln2;
  }
  return out;
}

absl::StatusOr<std::string> PipelineJob::hash(
    const std::vector<std::string>& sorted_names,
    const std::function<Tensor(const std::string&)>& value) {
  if (replica() != 0) return std::string();
  std::map<std::string, int64_t> elements;
  for (const NamedTensor& t : model_.named_tensors()) {
    elements[t.name] = t.elements();
  }
  Hasher hasher;
  Sending sending(pipeline_, deadline_);
  // Neighbours in name that one rank has are one message.
  const auto run = [&]() -> absl::Status {
    size_t end = 0;
    for (size_t begin = 0; begin < sorted_names.size(); begin = end) {
      const int owner = plan_.owner.at(sorted_names[begin]);
      int64_t n = 0;
      for (end = begin; end < sorted_names.size(); ++end) {
        const int64_t more = elements.at(sorted_names[end]);
        if (plan_.owner.at(sorted_names[end]) != owner ||
            (end > begin && n + more > kMostHashed)) {
          break;
        }
        n += more;
      }
      const Envelope at = {leader() ? owner : 0, kGatherChannel,
                           static_cast<int>(begin)};
      std::vector<float> values;
      if (owner == stage_rank()) {
        for (size_t i = begin; i < end; ++i) {
          const std::vector<float> more = f32_values(value(sorted_names[i]));
          values.insert(values.end(), more.begin(), more.end());
        }
        if (!leader()) {
          RETURN_IF_ERROR(sending.send(at, {Tensor::from(values, {n})}));
        }
      } else if (leader()) {
        ASSIGN_OR_RETURN(
            const Communicator::Ticket ticket,
            pipeline_.receive(at, kGatherSlot, {{DType::kF32, {n}}}));
        ASSIGN_OR_RETURN(const std::vector<Tensor> parts,
                         pipeline_.wait(ticket, deadline_));
        values = parts.at(0).to_vector<float>();
      }
      if (leader()) {
        hasher.update(values.data(), values.size() * sizeof(float));
      }
    }
    return sending.leave(0);
  };
  if (const absl::Status status = run(); !status.ok()) return lost(status);
  return leader() ? to_hex(hasher.digest()) : std::string();
}

absl::Status PipelineJob::save(const SnapshotStore& store,
                               const SnapshotContents& contents,
                               std::vector<std::string>* warnings) {
  ASSIGN_OR_RETURN(const uint64_t bytes,
                   sum("bytes of a snapshot", snapshot_bytes(contents)));
  absl::StatusOr<std::string> begun = std::string();
  if (leader()) begun = begin_snapshot(store, contents.step, bytes);
  ASSIGN_OR_RETURN(
      const std::string folder,
      from_leader(begun.ok() ? begun : ending(kExitDisk, begun.status())));
  if (folder.empty()) return absl::OkStatus();
  absl::StatusOr<std::string> part = std::string();
  if (replica() == 0) {
    part = write_snapshot_part(folder, stage_rank(), contents.tensors);
  }
  absl::Status status = agree(ending(kExitDisk, part.status()));
  if (status.ok()) {
    absl::StatusOr<std::vector<std::string>> all = tell("snapshot", *part);
    status = all.status();
    if (status.ok() && leader()) {
      std::vector<std::string> parts;
      for (int r : group_of(plan_.mesh, 0, {Axis::kPipeline})) {
        parts.push_back((*all)[r]);
      }
      status = ending(
          kExitDisk,
          end_snapshot(store, folder, contents, parts, warnings).status());
    }
    if (all.ok()) status = agree(status);
  }
  // Best effort; the next save tries again.
  if (!status.ok() && leader()) remove_path(folder).IgnoreError();
  return status;
}

absl::Status PipelineJob::export_model(const std::string& folder, DType dtype,
                                       const Companions& companions,
                                       uint64_t max_shard_bytes) {
  const std::string temporary = absl::StrCat(folder, ".tmp-", getpid());
  const auto begin = [&]() -> absl::StatusOr<std::string> {
    RETURN_IF_ERROR(remove_path(temporary));
    RETURN_IF_ERROR(make_directories(temporary));
    return temporary;
  };
  absl::StatusOr<std::string> begun = std::string();
  if (leader()) begun = begin();
  ASSIGN_OR_RETURN(
      const std::string place,
      from_leader(begun.ok() ? begun : ending(kExitDisk, begun.status())));
  HostTensors host;
  std::vector<NamedTensor> mine = tensors();
  std::erase_if(mine, [&](const NamedTensor& t) { return !writes(t.name); });
  add_with_copies(mine, companions, host);
  const std::vector<std::vector<NamedBytes>> shards =
      cut_shards(host.list(), max_shard_bytes);
  ASSIGN_OR_RETURN(const std::vector<std::string> counts,
                   tell("shards", absl::StrCat(shards.size())));
  size_t first = 1, all = 0;
  for (size_t r = 0; r < counts.size(); ++r) {
    size_t n = 0;
    CHECK(absl::SimpleAtoi(counts[r], &n));
    if (static_cast<int>(r) < rank()) first += n;
    all += n;
  }
  Json written = Json::Object();
  const auto write = [&]() -> absl::Status {
    for (size_t k = 0; k < shards.size(); ++k) {
      const std::string name = shard_name(first + k, all);
      RETURN_IF_ERROR(write_safetensors(join_path(place, name), shards[k]));
      Json& entry = written[name];
      entry = Json::Object();
      for (const NamedBytes& t : shards[k]) entry[t.name] = t.bytes();
    }
    return absl::OkStatus();
  };
  absl::Status status = agree(ending(kExitDisk, write()));
  if (status.ok()) {
    const absl::StatusOr<std::vector<std::string>> parts =
        tell("export", written.dump());
    status = parts.status();
    if (status.ok() && leader()) {
      status = write_shard_index(place, *parts, all);
      if (status.ok()) {
        status = write_companions(place, model_.config(), dtype, companions);
      }
      if (status.ok()) status = replace_folder(place, folder);
      status = ending(kExitDisk, status);
    }
    if (parts.ok()) status = agree(status);
  }
  if (!status.ok() && leader()) remove_path(place).IgnoreError();
  return status;
}

}  // namespace tapeline
