#include <algorithm>
#include <cmath>

#include "kernels/bench/bench.h"
#include "tests/support/close.h"

namespace tapeline::bench {

template <class T>
void Verifier::row(View<const T> got, const std::vector<double>& expected,
                   int64_t sum_length, double scale) {
  ++rows_;
  double squares = 0;
  for (double y : expected) squares += y * y;
  const double rms = std::sqrt(squares / static_cast<double>(expected.size()));
  for (size_t i = 0; i < expected.size(); ++i) {
    const double x = static_cast<double>(got(static_cast<int64_t>(i)));
    const double error = std::abs(x - expected[i]) / (rms > 0 ? rms : 1);
    if (!(error <= max_err_)) max_err_ = error;
  }
  const auto result = Close(got, view_of(expected, got.shape),
                            {.sum_length = sum_length, .scale = scale});
  if (!result && failures_.empty()) failures_ = result.message();
}
template void Verifier::row(View<const float>, const std::vector<double>&,
                            int64_t, double);
template void Verifier::row(View<const bf16>, const std::vector<double>&,
                            int64_t, double);
template void Verifier::row(View<const double>, const std::vector<double>&,
                            int64_t, double);

std::string Verifier::failures() const {
  return rows_ > 0 ? failures_ : "no row of this shape can be compared";
}

std::vector<int64_t> sampled_rows(int64_t n, int64_t count) {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = i * (n - 1) / std::max<int64_t>(1, count - 1);
    if (n > 0 && (rows.empty() || rows.back() != row)) rows.push_back(row);
  }
  return rows;
}

}  // namespace tapeline::bench
