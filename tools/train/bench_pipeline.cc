#include "tools/train/bench_pipeline.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "autograd/gradients.h"
#include "dist/all_gather.h"
#include "dist/communicator.h"
#include "dist/pipeline/executor.h"
#include "dist/pipeline/layout.h"
#include "dist/pipeline/lowering.h"
#include "dist/pipeline/schedule.h"
#include "models/batch.h"
#include "models/pipeline_stage.h"
#include "runtime/check.h"
#include "runtime/cuda_device.h"
#include "runtime/device.h"
#include "runtime/device_marks.h"
#include "runtime/status.h"
#include "tools/data/batches.h"
#include "tools/data/corpus.h"
#include "tools/train/evaluate.h"
#include "tools/train/exit_code.h"
#include "tools/train/language_model.h"
#include "tools/train/pipeline_connect.h"
#include "tools/train/pipeline_plan.h"
#include "tools/train/run_options.h"

namespace tapeline {
namespace {

// The largest message without a meaning of its own.
constexpr int64_t kMostBytes = int64_t{1} << 28;

std::string device_name() {
  return Device::current().kind() == DeviceKind::kCuda ? cuda_properties()->name
                                                       : "cpu";
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// A model without values, its stages and a step's data.
struct Pipeline {
  std::unique_ptr<LanguageModel> model;
  PipelinePlan plan;
  std::vector<std::unique_ptr<LanguageModelStage>> stages;
  StepData data;
};

// Addresses are kept: the stages look at model, plan and data.
absl::StatusOr<std::unique_ptr<Pipeline>> make_parts(const Config& c, int ranks,
                                                     const StagesOptions& o) {
  auto out = std::make_unique<Pipeline>();
  ASSIGN_OR_RETURN(const Json json, model_config(c, o.model_path));
  ASSIGN_OR_RETURN(out->model, make_language_model(json, model_choices(c)));
  ASSIGN_OR_RETURN(out->plan,
                   plan_pipeline(c, *out->model, ranks, o.schedule_file));
  if (out->plan.mesh.dp > 1) {
    return absl::InvalidArgumentError(
        "replicas have the same stages; leave pipeline.ranks out");
  }
  ASSIGN_OR_RETURN(const Corpus text, load_corpus(o.data));
  RETURN_IF_ERROR(check_vocabulary(text, o.data, out->model->vocabulary()));
  ASSIGN_OR_RETURN(
      const TrainBatches batches,
      TrainBatches::create(text, c.train.seq_len, c.train.micro_batches,
                           static_cast<uint64_t>(c.seed)));
  for (int64_t m = 0; m < c.train.micro_batches; ++m) {
    MicroBatch mb = batches.get(1, m);
    out->data.batches.push_back(
        {std::move(mb.ids), std::move(mb.labels), std::move(mb.cu_seqlens)});
  }
  const TrainerOptions options = trainer_options(c);
  out->data.n = count_targets(out->data.batches, out->model->mtp_depths());
  out->data.mtp_weight = options.loss.mtp_weight;
  out->data.coefficients = {options.loss.balance, options.loss.z,
                            options.loss.indexer};
  ASSIGN_OR_RETURN(std::vector<bool> recompute,
                   recomputed_layers(c, out->model->layers()));
  const StageMemory memory = {.recompute = std::move(recompute),
                              .keep = options.keep,
                              .drop_norms = options.drop_norms,
                              .offload = options.offload,
                              .strict_offload = options.strict_offload};
  for (int s = 0; s < out->plan.stages(); ++s) {
    out->stages.push_back(
        out->model->make_stage(out->plan.layout, s, compute_dtype(c), memory));
  }
  return out;
}

// All stages on one rank, a micro-batch after the other.
Schedule one_by_one(int stages, int micro_batches, bool split) {
  Schedule s;
  s.micro_batches = micro_batches;
  s.placement.assign(static_cast<size_t>(stages), 0);
  std::vector<Action>& actions = s.ranks.emplace_back();
  for (int j = 0; j < micro_batches; ++j) {
    for (int k = 0; k < stages; ++k) actions.push_back(forward(k, j));
    for (int k = stages; k-- > 0;) {
      if (split) {
        actions.push_back(pass(PassKind::kInput, k, j));
        actions.push_back(pass(PassKind::kWeight, k, j));
      } else {
        actions.push_back(pass(PassKind::kBackward, k, j));
      }
    }
  }
  return s;
}

}  // namespace

absl::StatusOr<StagesReport> bench_stages(const Config& c,
                                          const StagesOptions& o) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Pipeline> parts,
                   make_parts(c, o.ranks, o));
  initialize(parts->model->named_tensors(), compute_dtype(c),
             static_cast<uint64_t>(c.seed), parts->model->initializer_std());
  parts->model->apply_training_choices();
  const int stages = parts->plan.stages();
  const auto micro_batches = static_cast<int>(c.train.micro_batches);
  ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> alone,
                   connect_processes({}, parts->plan, Device::current().kind(),
                                     absl::Seconds(1), absl::Seconds(1)));
  std::map<int, Stage*> by_number;
  for (int s = 0; s < stages; ++s) by_number[s] = parts->stages[s].get();

  ParameterGradients grads;
  std::map<std::pair<int, PassKind>, std::vector<double>> ms;
  for (const bool split : {false, true}) {
    const Schedule schedule = one_by_one(stages, micro_batches, split);
    ASSIGN_OR_RETURN(const std::vector<RankProgram> programs, lower(schedule));
    Executor executor(schedule, programs, *alone, by_number);
    for (int64_t i = 0; i < o.warmup + o.repeats; ++i) {
      grads.zero();
      StepLog log(micro_batches, parts->model->layers(),
                  parts->model->experts());
      for (const auto& stage : parts->stages) {
        stage->begin_step(parts->data, log);
      }
      RETURN_IF_ERROR(executor.step(grads));
      for (const auto& [key, time] : executor.times().passes) {
        if (i < o.warmup || (split && key.second == PassKind::kForward)) {
          continue;
        }
        ms[key].push_back(1e3 * time.seconds /
                          static_cast<double>(time.passes));
      }
      RETURN_IF_ERROR(log.exchange(*alone, absl::Seconds(1)));
    }
  }
  StagesReport report{.device = device_name(),
                      .dtype = std::string(name_of(compute_dtype(c))),
                      .schedule = parts->plan.name,
                      .layout = layout_text(parts->plan.layout),
                      .micro_batches = micro_batches,
                      .seq = c.train.seq_len,
                      .stages = {}};
  for (int s = 0; s < stages; ++s) {
    report.stages.push_back(
        {.forward = median(ms.at({s, PassKind::kForward})),
         .input = median(ms.at({s, PassKind::kInput})),
         .weight = median(ms.at({s, PassKind::kWeight})),
         .backward = median(ms.at({s, PassKind::kBackward}))});
  }
  return report;
}

namespace {

// What a message is and who exchanges it.
struct Exchange {
  int from = 0, to = 0, channel = 0;
  int back = 0;  // channel of the answer
  std::vector<TensorSpec> specs;
};

int64_t bytes_of(const std::vector<TensorSpec>& specs) {
  int64_t bytes = 0;
  for (const TensorSpec& spec : specs) {
    bytes += spec.shape.elements() * static_cast<int64_t>(size_of(spec.dtype));
  }
  return bytes;
}

// Milliseconds one way. Every message is sent when the one before has come.
absl::StatusOr<double> round_trips(Communicator& c, const Exchange& e,
                                   int64_t repeats, absl::Duration deadline) {
  const bool begins = c.rank() == e.from;
  if (!begins && c.rank() != e.to) return 0.0;
  const int peer = begins ? e.to : e.from;
  Stream& stream = Device::current().compute();
  std::vector<Tensor> parts;
  for (const TensorSpec& spec : e.specs) {
    parts.push_back(Tensor::zeros(spec.shape, spec.dtype));
  }
  const auto await = [&] {
    for (const Tensor& x : parts) {
      x.storage()->acquire(stream);
      x.storage()->release(stream, /*wrote=*/false);
    }
  };
  DeviceMarks marks;
  const size_t begin = marks.mark(stream);
  for (int64_t i = 0; i < repeats; ++i) {
    const auto send = [&]() -> absl::Status {
      ASSIGN_OR_RETURN(
          const Communicator::Ticket ticket,
          c.send({peer, begins ? e.channel : e.back, static_cast<int>(i)},
                 e.specs, parts));
      return c.wait(ticket, deadline).status();
    };
    if (begins) RETURN_IF_ERROR(send());
    ASSIGN_OR_RETURN(
        const Communicator::Ticket ticket,
        c.receive({peer, begins ? e.back : e.channel, static_cast<int>(i)},
                  /*slot=*/0, e.specs));
    ASSIGN_OR_RETURN(parts, c.wait(ticket, deadline));
    if (!begins) RETURN_IF_ERROR(send());
  }
  await();
  const size_t end = marks.mark(stream);
  return marks.ms(end) / static_cast<double>(2 * repeats) -
         marks.ms(begin) / static_cast<double>(2 * repeats);
}

}  // namespace

absl::StatusOr<MessagesReport> bench_messages(const Config& c,
                                              const Launched& launch,
                                              const StagesOptions& o) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Pipeline> parts,
                   make_parts(c, launch.world, o));
  const PipelinePlan& plan = parts->plan;
  const absl::Duration deadline = absl::Seconds(c.pipeline.timeout);
  ASSIGN_OR_RETURN(
      const std::unique_ptr<Communicator> communicator,
      connect_processes(launch, plan, Device::current().kind(),
                        absl::Seconds(c.pipeline.connect_timeout), deadline));
  MessagesReport report{.device = device_name(),
                        .schedule = plan.name,
                        .layout = layout_text(plan.layout),
                        .ranks = launch.world,
                        .repeats = o.repeats,
                        .sizes = {},
                        .messages = {}};
  StepLog log(static_cast<int>(c.train.micro_batches), parts->model->layers(),
              parts->model->experts());
  for (const auto& stage : parts->stages) stage->begin_step(parts->data, log);

  const auto time = [&](Exchange e, const std::string& what,
                        std::vector<MessageTime>& to) -> absl::Status {
    for (const bool timed : {false, true}) {
      const int64_t n = timed ? o.repeats : o.warmup;
      if (n == 0) continue;
      absl::StatusOr<double> ms = round_trips(*communicator, e, n, deadline);
      if (!ms.ok()) return ending(kExitCommunication, ms.status());
      if (timed) to.push_back({what, e.from, e.to, bytes_of(e.specs), *ms});
    }
    return absl::OkStatus();
  };
  for (int s = 0; s + 1 < plan.stages(); ++s) {
    const int here = plan.schedule.placement[s];
    const int there = plan.schedule.placement[s + 1];
    if (here == there) continue;
    const std::vector<TensorSpec> specs = parts->stages[s]->outputs(0);
    std::vector<TensorSpec> gradients;
    for (const TensorSpec& spec : specs) {
      if (is_float(spec.dtype)) gradients.push_back(spec);
    }
    const int output = channel_of({true, s});
    const int gradient = channel_of({false, s + 1});
    if (report.sizes.empty()) {
      for (int64_t bytes = 8; bytes <= kMostBytes; bytes *= 8) {
        RETURN_IF_ERROR(
            time({here, there, output, gradient, {{DType::kF32, {bytes / 4}}}},
                 "", report.sizes));
      }
    }
    RETURN_IF_ERROR(time({here, there, output, gradient, specs},
                         absl::StrCat("output ", s), report.messages));
    RETURN_IF_ERROR(time({there, here, gradient, output, gradients},
                         absl::StrCat("gradient ", s + 1), report.messages));
  }
  // Who is not at the begin of a message has not timed it.
  std::vector<double> ms;
  for (std::vector<MessageTime>* list : {&report.sizes, &report.messages}) {
    for (const MessageTime& m : *list) {
      ms.push_back(m.from == launch.rank ? m.ms : 0);
    }
  }
  const absl::Status told =
      all_reduce(*communicator, "message times", ms, deadline);
  if (!told.ok()) return ending(kExitCommunication, told);
  size_t next = 0;
  for (std::vector<MessageTime>* list : {&report.sizes, &report.messages}) {
    for (MessageTime& m : *list) m.ms = ms[next++];
  }
  for (const MessageTime& m : report.messages) {
    report.latency += m.ms / static_cast<double>(report.messages.size());
  }
  return report;
}

Json to_json(const StagesReport& r) {
  Json json;
  json["schema"] = 1;
  json["device"] = r.device;
  json["dtype"] = r.dtype;
  json["unit"] = "ms";
  json["schedule"] = r.schedule;
  json["layout"] = r.layout;
  json["micro_batches"] = r.micro_batches;
  json["seq"] = r.seq;
  Json::Array stages;
  for (const StagePasses& s : r.stages) {
    Json& stage = stages.emplace_back();
    stage["F"] = s.forward;
    stage["I"] = s.input;
    stage["W"] = s.weight;
    stage["B"] = s.backward;
  }
  json["stages"] = std::move(stages);
  return json;
}

std::string to_text(const StagesReport& r) {
  std::string out =
      absl::StrCat(r.device, ", ", r.dtype, ", stages ", r.layout,
                   "; milliseconds of a micro-batch of ", r.seq, " tokens\n",
                   "stage        F        I        W        B\n");
  for (size_t s = 0; s < r.stages.size(); ++s) {
    const StagePasses& of = r.stages[s];
    char line[96];
    std::snprintf(line, sizeof(line), "%5zu %8.3f %8.3f %8.3f %8.3f\n", s,
                  of.forward, of.input, of.weight, of.backward);
    out += line;
  }
  return out;
}

namespace {

double per_second(const MessageTime& m) {
  return m.ms > 0 ? 1e-6 * static_cast<double>(m.bytes) / m.ms : 0;
}

Json::Array to_json(const std::vector<MessageTime>& list) {
  Json::Array out;
  for (const MessageTime& m : list) {
    Json& item = out.emplace_back();
    if (!m.what.empty()) item["what"] = m.what;
    item["from"] = m.from;
    item["to"] = m.to;
    item["bytes"] = m.bytes;
    item["ms"] = m.ms;
    item["gb_per_s"] = per_second(m);
  }
  return out;
}

}  // namespace

Json to_json(const MessagesReport& r) {
  Json json;
  json["schema"] = 1;
  json["device"] = r.device;
  json["unit"] = "ms";
  json["schedule"] = r.schedule;
  json["layout"] = r.layout;
  json["ranks"] = r.ranks;
  json["repeats"] = r.repeats;
  json["sizes"] = to_json(r.sizes);
  json["messages"] = to_json(r.messages);
  json["latency"] = r.latency;
  return json;
}

std::string to_text(const MessagesReport& r) {
  std::string out = absl::StrCat(
      r.device, ", ", r.ranks, " ranks, stages ", r.layout, "; one way, of ",
      r.repeats, " round trips\n",
      "               from  to        bytes         ms     GB/s\n");
  for (const std::vector<MessageTime>* list : {&r.sizes, &r.messages}) {
    for (const MessageTime& m : *list) {
      char line[128];
      std::snprintf(line, sizeof(line),
                    "%-14.14s %4d %3d %12lld %10.4f %8.1f\n", m.what.c_str(),
                    m.from, m.to, static_cast<long long>(m.bytes), m.ms,
                    per_second(m));
      out += line;
    }
  }
  return absl::StrCat(out, "a message on average: ", r.latency, " ms\n");
}

}  // namespace tapeline
