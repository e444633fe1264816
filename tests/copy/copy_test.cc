// A task that only working attention can solve: repeat what was seen 32 tokens
// ago. Keys are selected (16 of up to 64), so the indexer has to find the right
// one too; it learns that from its own loss alone.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "autograd/optimizer.h"
#include "autograd/tape.h"
#include "gtest/gtest.h"
#include "models/batch.h"
#include "models/context.h"
#include "models/glm_moe_dsa.h"
#include "models/mla_lm.h"
#include "models/weights.h"
#include "runtime/random.h"

namespace tapeline {
namespace {

constexpr int kVocabulary = 32, kHalf = 32, kSequences = 16, kSteps = 400;

MlaLmConfig config() {
  Json json(Json::Object{});
  json["vocab_size"] = kVocabulary;
  json["hidden_size"] = 64;
  json["num_hidden_layers"] = 2;
  json["intermediate_size"] = 96;
  json["moe_intermediate_size"] = 48;
  json["num_attention_heads"] = 4;
  json["q_lora_rank"] = 48;
  json["kv_lora_rank"] = 32;
  json["qk_nope_head_dim"] = 16;
  json["qk_rope_head_dim"] = 16;
  json["v_head_dim"] = 16;
  json["index_topk"] = 16;
  json["index_n_heads"] = 4;
  json["index_head_dim"] = 32;
  json["first_k_dense_replace"] = 1;
  json["n_routed_experts"] = 4;
  json["num_experts_per_tok"] = 2;
  json["routed_scaling_factor"] = 1.0;
  absl::StatusOr<MlaLmConfig> parsed = parse_glm_moe_dsa(json);
  CHECK(parsed.ok()) << parsed.status().message();
  parsed->indexer_training = IndexerTraining::kSelectedKeys;
  return *std::move(parsed);
}

// Each sequence is a random half, then the same half again. Only the second
// half has labels.
HostBatch make_host_batch(uint64_t seed, int step) {
  const Random random(seed, "copy", static_cast<uint64_t>(step));
  HostBatch batch;
  batch.cu_seqlens = {0};
  uint64_t drawn = 0;
  for (int s = 0; s < kSequences; ++s) {
    std::vector<int32_t> half;
    for (int t = 0; t < kHalf; ++t) {
      half.push_back(static_cast<int32_t>(random.below(kVocabulary, drawn++)));
    }
    for (int t = 0; t < 2 * kHalf; ++t) {
      batch.ids.push_back(half[t % kHalf]);
      const bool asked = t >= kHalf - 1 && t + 1 < 2 * kHalf;
      batch.labels.push_back(asked ? half[(t + 1) % kHalf] : -100);
    }
    batch.cu_seqlens.push_back(static_cast<int32_t>(batch.ids.size()));
  }
  return batch;
}

Context make_context(const MlaLm& model, const HostBatch& batch) {
  Context ctx;
  ctx.sequence = Sequence::packed(batch.cu_seqlens);
  model.prepare(ctx);
  return ctx;
}

double accuracy(const MlaLm& model) {
  const HostBatch batch = make_host_batch(/*seed=*/2, 0);
  Context ctx = make_context(model, batch);
  const auto tokens = static_cast<int64_t>(batch.ids.size());
  const std::vector<float> logits =
      model.logits(Tensor::from(batch.ids, {tokens}), ctx).to_vector<float>();
  int right = 0, asked = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    if (batch.labels[t] < 0) continue;
    const auto row = logits.begin() + t * kVocabulary;
    const auto best = std::max_element(row, row + kVocabulary) - row;
    right += best == batch.labels[t];
    ++asked;
  }
  return static_cast<double>(right) / asked;
}

// Sets every attention output projection to zero, and keeps it there.
void ablate_attention(MlaLm& model) {
  for (DecoderLayer& layer : model.layers.items) {
    layer.attention.mla.o.weight.value().set_zero();
    layer.attention.mla.o.weight.set_trainable(false);
  }
}

double train_and_measure(bool ablated) {
  MlaLm model{std::make_shared<const MlaLmConfig>(config())};
  const std::vector<NamedTensor> tensors = model.named_tensors();
  initialize(tensors, DType::kF32, /*seed=*/1, /*normal_std=*/0.08);
  model.apply_training_choices();
  if (ablated) ablate_attention(model);
  Optimizer optimizer(optimized_tensors(tensors),
                      {.adamw = {.weight_decay = 0.0}, .max_norm = 1});
  ParameterGradients grads;
  for (int step = 0; step < kSteps; ++step) {
    const HostBatch host = make_host_batch(/*seed=*/1, step);
    const Denominators n = count_targets({host}, 0);
    const Batch batch = make_batch(host, n, 0, DType::kF32);
    Context ctx = make_context(model, host);
    ctx.weights.indexer = 1.0 / static_cast<double>(n.tokens);
    auto [loss, tape] = record([&] { return model.loss(batch, ctx); });
    tape.backward(loss.total, grads);
    const double warmup = std::min(1.0, (step + 1) / 20.0);
    optimizer.step(grads, 4e-3 * warmup * (1 - 0.9 * step / kSteps));
    grads.zero();
  }
  return accuracy(model);
}

TEST(Copy, IsLearnedThroughSelectedKeys) {
  EXPECT_GE(train_and_measure(/*ablated=*/false), 0.95);
}

TEST(Copy, CannotBeLearnedWithoutAttention) {
  EXPECT_LE(train_and_measure(/*ablated=*/true), 0.2);
}

}  // namespace
}  // namespace tapeline
