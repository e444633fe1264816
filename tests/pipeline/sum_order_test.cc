// Replicas' gradients against sums made here, in the order that
// pipeline_trainer.h states: each replica's over its micro-batches, then over
// replicas.
#include <memory>
#include <string>
#include <vector>

#include "autograd/tape.h"
#include "gtest/gtest.h"
#include "models/weights.h"
#include "runtime/check.h"
#include "runtime/file.h"
#include "runtime/json.h"
#include "tests/cli/child.h"
#include "tools/config/config.h"
#include "tools/data/batches.h"
#include "tools/data/corpus.h"
#include "tools/train/language_model.h"
#include "tools/train/run_options.h"
#include "tools/train/state_hash.h"

namespace tapeline {
namespace {

template <class T>
T must(absl::StatusOr<T> value) {
  CHECK(value.ok()) << value.status().message();
  return *std::move(value);
}

// The first step's gradients of a run that `replicas` share.
std::string hash_of_sums(const std::string& config_file, int micro_batches,
                         int replicas) {
  const Config c = must(load_config(
      config_file, {"train.micro_batches=" + std::to_string(micro_batches)}));
  const std::unique_ptr<LanguageModel> model =
      must(make_language_model(must(model_config(c, "")), model_choices(c)));
  const std::vector<NamedTensor> tensors =
      sorted_by_name(model->named_tensors());
  initialize(tensors, DType::kF32, static_cast<uint64_t>(c.seed),
             model->initializer_std());
  model->apply_training_choices();
  const Corpus corpus = must(load_corpus(c.data.train));
  const TrainBatches batches = must(TrainBatches::create(
      corpus, c.train.seq_len, micro_batches, static_cast<uint64_t>(c.seed)));
  std::vector<HostBatch> step;
  for (int m = 0; m < micro_batches; ++m) {
    MicroBatch mb = batches.get(1, m);
    step.push_back({mb.ids, mb.labels, mb.cu_seqlens});
  }
  const Denominators n = count_targets(step, model->mtp_depths());
  const Optimizer optimizer(optimized_tensors(tensors), {});
  ParameterGradients sum;
  for (int r = 0; r < replicas; ++r) {
    ParameterGradients own;
    for (int m = 0; m < micro_batches / replicas; ++m) {
      const HostBatch& host =
          step[static_cast<size_t>(r * (micro_batches / replicas) + m)];
      Context ctx;
      ctx.sequence = Sequence::packed(host.cu_seqlens);
      const auto share =
          static_cast<double>(host.ids.size()) / static_cast<double>(n.tokens);
      ctx.weights = {
          c.loss.balance_coefficient * share, c.loss.z_coefficient * share,
          c.loss.indexer_coefficient / static_cast<double>(n.tokens)};
      model->prepare(ctx);
      const Batch batch = make_batch(host, n, c.loss.mtp_weight, DType::kF32);
      auto [loss, tape] = record([&] { return model->loss(batch, ctx); });
      tape.backward(loss.total, own);
    }
    for (const OptimizedTensor& t : optimizer.tensors()) {
      const Tensor to = t.block(sum.accumulator(t.parameter, 0));
      std::vector<float> values = to.to_vector<float>();
      const std::vector<float> more =
          optimizer.gradient(own, t).to_vector<float>();
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = r == 0 ? more[i] : values[i] + more[i];
      }
      to.assign(values);
    }
  }
  return gradient_hash(optimizer, sum);
}

TEST(Replicas, B18_B23_GradientsAreSumsOverReplicasInTheirOrder) {
  TempFolder folder;
  const std::string config = small_config(folder);
  for (const int replicas : {2, 3}) {
    std::vector<std::string> hashes;
    for (const int ranks : {1, 2}) {
      if (ranks * replicas > 4) continue;
      SCOPED_TRACE(std::to_string(replicas) + " x " + std::to_string(ranks));
      const std::string name =
          "r" + std::to_string(replicas) + "x" + std::to_string(ranks);
      const ChildResult r = tapeline_run(
          {"train", "--config", config, "--nproc",
           std::to_string(replicas * ranks), "--set", "run.name=" + name,
           "--set", "train.steps=1", "--set", "train.micro_batches=6", "--set",
           "pipeline.ranks=" + std::to_string(ranks)});
      ASSERT_EQ(r.code, 0) << r.err;
      const std::string text =
          read_file(folder / ("runs/" + name + "/metrics.jsonl")).value();
      const Json row =
          parse_json(text.substr(0, text.find('\n')), "row").value();
      hashes.push_back(row.find("grad_hash")->string());
    }
    const std::string want = hash_of_sums(config, 6, replicas);
    for (const std::string& hash : hashes) EXPECT_EQ(hash, want);
    // One device adds in another order.
    EXPECT_NE(want, hash_of_sums(config, 6, 1));
  }
}

}  // namespace
}  // namespace tapeline
