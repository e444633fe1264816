#include "tools/train/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "autograd/mode.h"
#include "runtime/access.h"
#include "runtime/check.h"
#include "runtime/random.h"
#include "runtime/status.h"
#include "tools/train/exit_code.h"

namespace tapeline {
namespace {

// The last row of the logits of `ids`, which follow `cached` earlier tokens.
std::vector<float> last_logits(const LanguageModel& model,
                               const std::vector<int32_t>& ids, int64_t cached,
                               KvCache* cache) {
  Context ctx;
  const auto count = static_cast<int64_t>(ids.size());
  ctx.sequence = Sequence::appended(cached, count);
  ctx.cache = cache;
  ctx.count_experts = false;
  model.prepare(ctx);
  const Tensor logits = model.logits(Tensor::from(ids, {count}), ctx);
  const Tensor row = logits.slice(0, count - 1, count);
  std::vector<float> out;
  dispatch_float(row.dtype(), [&]<class T>() {
    const std::vector<T> values = row.to_vector<T>();
    out.assign(values.begin(), values.end());
  });
  return out;
}

}  // namespace

int32_t choose_token(const std::vector<float>& logits,
                     const GenerateOptions& options, uint64_t draw) {
  const auto best = std::max_element(logits.begin(), logits.end());
  if (options.temperature <= 0) {
    return static_cast<int32_t>(best - logits.begin());
  }
  std::vector<double> p(logits.size());
  for (size_t i = 0; i < p.size(); ++i) {
    p[i] = std::exp((static_cast<double>(logits[i]) - *best) /
                    options.temperature);
  }
  std::vector<int32_t> order(p.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return p[a] > p[b]; });
  const double all = std::accumulate(p.begin(), p.end(), 0.0);
  double kept = 0;
  size_t count = 0;
  while (count < order.size() && (count == 0 || kept < options.top_p * all)) {
    kept += p[order[count++]];
  }
  double at = kept * Random(options.seed, "sample").uniform(draw);
  for (size_t i = 0; i < count; ++i) {
    at -= p[order[i]];
    if (at < 0) return order[i];
  }
  return order[count - 1];
}

absl::StatusOr<std::vector<int32_t>> generate(
    const LanguageModel& model, const std::vector<int32_t>& prompt,
    const GenerateOptions& options) {
  if (prompt.empty()) {
    return absl::InvalidArgumentError(
        "the prompt is empty; give at least one token to go on from");
  }
  for (int32_t id : prompt) {
    if (id >= 0 && id < model.vocabulary()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("token ", id,
                     " of the prompt is outside the vocabulary "
                     "of ",
                     model.vocabulary(), "; use a model with more tokens"));
  }
  const GradModeScope off(GradMode::kOff);
  KvCache cache;
  std::vector<int32_t> all = prompt, fresh = prompt, out;
  for (int64_t i = 0; i < options.max_tokens; ++i) {
    const int64_t cached =
        static_cast<int64_t>(all.size()) - static_cast<int64_t>(fresh.size());
    const std::vector<float> logits =
        last_logits(model, fresh, cached, options.cache ? &cache : nullptr);
    if (!std::all_of(logits.begin(), logits.end(),
                     [](float x) { return std::isfinite(x); })) {
      return ending(kExitNotFinite,
                    absl::OutOfRangeError(absl::StrCat(
                        "the logits of token ", all.size(),
                        " are not finite; use weights from before training "
                        "diverged")));
    }
    const int32_t id = choose_token(logits, options, static_cast<uint64_t>(i));
    out.push_back(id);
    all.push_back(id);
    fresh = options.cache ? std::vector<int32_t>{id} : all;
    const std::vector<int64_t>& ends = model.eos_ids();
    if (std::find(ends.begin(), ends.end(), id) != ends.end()) break;
  }
  return out;
}

std::vector<int32_t> byte_ids(std::string_view text) {
  std::vector<int32_t> ids;
  for (char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

std::string byte_text(const std::vector<int32_t>& ids) {
  std::string text;
  for (int32_t id : ids) {
    if (id >= 0 && id < 256) text += static_cast<char>(id);
  }
  return text;
}

}  // namespace tapeline
