#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/rope/rope.h"

namespace tapeline {
namespace {

void check(const RopeOptions& o) {
  CHECK(o.dim > 0 && o.dim % 2 == 0 && o.theta > 1)
      << "[rope] dim " << o.dim << ", theta " << o.theta;
  if (o.scaling == RopeOptions::kDefault) return;
  CHECK(o.factor >= 1 && o.original_max_position > 0)
      << "[rope] factor " << o.factor << ", original_max_position "
      << o.original_max_position;
}

// theta^(-2j / R) with the roundings of f32 arithmetic.
std::vector<double> ladder(const RopeOptions& o) {
  std::vector<double> out;
  for (int j = 0; j < o.dim / 2; ++j) {
    const float exponent =
        static_cast<float>(2 * j) / static_cast<float>(o.dim);
    const float power =
        static_cast<float>(std::pow(o.theta, static_cast<double>(exponent)));
    out.push_back(1.0f / power);
  }
  return out;
}

// Share of slowing for pair j: 0 before `low`, 1 after `high`.
double ramp(double j, double low, double high) {
  return std::clamp((j - low) / (high - low), 0.0, 1.0);
}

void scale_yarn(const RopeOptions& o, std::vector<double>& inverse) {
  // The pair, as a real number, that turns `turns` times in the old context.
  const auto pair_of = [&](double turns) {
    const double context = static_cast<double>(o.original_max_position);
    return o.dim * std::log(context / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(o.theta));
  };
  double low = pair_of(o.beta_fast), high = pair_of(o.beta_slow);
  if (o.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, o.dim - 1.0);
  if (low == high) high += 0.001;  // a step, not 0 / 0
  for (size_t j = 0; j < inverse.size(); ++j) {
    const double slow = ramp(static_cast<double>(j), low, high);
    inverse[j] = inverse[j] / o.factor * slow + inverse[j] * (1 - slow);
  }
}

void scale_llama3(const RopeOptions& o, std::vector<double>& inverse) {
  const double context = static_cast<double>(o.original_max_position);
  for (double& f : inverse) {
    // Turns in the old context, from low (all slowed) to high (all kept).
    const double turns = context * f / (2 * std::numbers::pi);
    const double keep = ramp(turns, o.low_freq_factor, o.high_freq_factor);
    f = (1 - keep) * f / o.factor + keep * f;
  }
}

}  // namespace

std::vector<double> rope_inverse_frequencies(const RopeOptions& options) {
  check(options);
  std::vector<double> inverse = ladder(options);
  if (options.scaling == RopeOptions::kYarn) scale_yarn(options, inverse);
  if (options.scaling == RopeOptions::kLlama3) scale_llama3(options, inverse);
  for (double& f : inverse) f = static_cast<float>(f);
  return inverse;
}

double rope_attention_factor(const RopeOptions& options) {
  if (options.attention_factor != 0) return options.attention_factor;
  if (options.scaling != RopeOptions::kYarn) return 1;
  const auto m = [&](double scale) {
    return options.factor <= 1 ? 1 : 0.1 * scale * std::log(options.factor) + 1;
  };
  if (options.mscale != 0 && options.mscale_all_dim != 0) {
    return m(options.mscale) / m(options.mscale_all_dim);
  }
  return m(1);
}

}  // namespace tapeline
