#include "tools/train/evaluate.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "absl/strings/str_cat.h"
#include "autograd/mode.h"
#include "models/batch.h"

namespace tapeline {

int64_t eval_tokens(int64_t seq_len) {
  return std::max<int64_t>(seq_len, 2048);
}

absl::Status check_vocabulary(const Corpus& corpus, const std::string& name,
                              int64_t vocabulary) {
  for (size_t i = 0; i < corpus.text.size(); ++i) {
    const int id = static_cast<unsigned char>(corpus.text[i]);
    if (id < vocabulary) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": token ", id, " is outside the vocabulary of ",
                     vocabulary, "; set vocab_size to 256 or clean the text"));
  }
  return absl::OkStatus();
}

Evaluation evaluate(const LanguageModel& model, const EvalBatches& batches,
                    bool (*stop)()) {
  const GradModeScope off(GradMode::kOff);
  // Weight 1 for every label and no prediction depths: the loss is a sum.
  const Denominators sums{.tokens = 1, .lm = 1, .mtp = {}};
  double nats = 0;
  Evaluation out;
  for (int64_t i = 0; i < batches.size(); ++i) {
    if (stop != nullptr && stop()) return {};
    MicroBatch mb = batches.get(i);
    out.bytes += mb.valid_labels();
    out.tokens += mb.tokens();
    const HostBatch host{std::move(mb.ids), std::move(mb.labels),
                         std::move(mb.cu_seqlens)};
    Context ctx;
    ctx.sequence = Sequence::packed(host.cu_seqlens);
    ctx.count_experts = false;
    model.prepare(ctx);
    const Batch batch = make_batch(host, sums, 0, DType::kF32);
    nats += model.loss(batch, ctx).lm.to_vector<float>()[0];
  }
  if (out.bytes > 0) {
    out.loss = nats / static_cast<double>(out.bytes);
    out.bits_per_byte = out.loss / std::numbers::ln2;
  }
  return out;
}

}  // namespace tapeline
