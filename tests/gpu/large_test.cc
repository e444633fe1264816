// More than 2^31 elements in one operand: where an index in 32 bits would wrap.
// Rows repeat after a prime number of them, so that a row can be known on the
// host, and one that was taken for another is another. What is expected is
// computed on the host, in f64, for rows at both ends and beside 2^31.
#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "autograd/ops.h"
#include "autograd/tape.h"
#include "gtest/gtest.h"
#include "kernels/combine/combine.h"
#include "kernels/dispatch/dispatch.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/grouped_matmul/grouped_matmul.h"
#include "kernels/grouped_matmul/grouped_matmul_fast.h"
#include "kernels/route/route.h"
#include "kernels/swiglu/swiglu.h"
#include "runtime/access.h"
#include "tests/support/close.h"

namespace tapeline {
namespace {

constexpr int64_t kWrap = int64_t{1} << 31;

double to_double(bf16 x) { return float{x}; }
double to_double(float x) { return x; }

// Values on the bf16 grid.
template <class T>
std::vector<T> normal(int64_t n, uint32_t seed, float scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw(0, scale);
  std::vector<T> values(static_cast<size_t>(n));
  for (T& x : values) x = T(float{bf16(draw(random))});
  return values;
}

// A tensor of so many rows, row i that of i % kPeriod in `base`.
template <class T>
struct Periodic {
  static constexpr int64_t kPeriod = 61;
  Periodic(int64_t row_count, int64_t width, uint32_t seed, float scale = 1)
      : columns(width),
        base(normal<T>(kPeriod * width, seed, scale)),
        tensor(Tensor::empty({row_count, width}, dtype_of<T>())) {
    const Tensor rows = Tensor::from(base, {kPeriod, width});
    const auto from = read<T>(rows);
    const auto to = write<T>(tensor);
    const int64_t whole = row_count / kPeriod, done = whole * kPeriod;
    copy<T>(
        launch(),
        View<const T>(from.view().data, {whole, kPeriod, width}, {0, width, 1}),
        View<T>(to.view().data, {whole, kPeriod, width}));
    copy<T>(launch(), from.view().slice(0, 0, row_count - done),
            to.view().slice(0, done, row_count));
  }
  double operator()(int64_t i, int64_t j) const {
    return to_double(base[i % kPeriod * columns + j]);
  }
  int64_t columns;
  std::vector<T> base;
  Tensor tensor;
};

template <class T>
std::vector<T> row_of(const Tensor& x, int64_t i) {
  return x.slice(0, i, i + 1).to_vector<T>();
}

// Of [rows, columns]: both ends, those beside every multiple of 2^31 elements,
// and some between.
std::set<int64_t> rows_to_look_at(int64_t rows, int64_t columns) {
  std::set<int64_t> out = {0, 1, rows / 3, rows - 2, rows - 1};
  for (int64_t at = kWrap; at < rows * columns; at += kWrap) {
    for (int64_t i : {-1, 0, 1}) out.insert(at / columns + i);
  }
  std::mt19937_64 random(3);
  for (int i = 0; i < 8; ++i) {
    out.insert(static_cast<int64_t>(random() % rows));
  }
  while (*out.rbegin() >= rows) out.erase(*out.rbegin());
  return out;
}

// --- rows of tokens ----------------------------------------------------------

// Eight rows for each token, 2^31 elements of them.
struct Rows8 {
  static constexpr int64_t kTokens = 37'450, kTopK = 8, kWidth = 7168,
                           kRows = kTokens * kTopK, kExperts = 256;
  static_assert(kRows * kWidth > kWrap);

  Rows8() {
    std::vector<int32_t> ids(kRows);
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t k = 0; k < kTopK; ++k) {
        ids[t * kTopK + k] =
            static_cast<int32_t>((t * 37 + k * 31 + t / 256) % kExperts);
      }
    }
    const Tensor offsets = Tensor::empty({kExperts + 1}, DType::kI32);
    const Tensor token = Tensor::empty({kRows}, DType::kI32);
    const Tensor slot = Tensor::empty({kRows}, DType::kI32);
    route(launch(), read<int32_t>(Tensor::from(ids, {kTokens, kTopK})),
          write<int32_t>(offsets), write<int32_t>(row), write<int32_t>(token),
          write<int32_t>(slot));
    row_of_pair = row.to_vector<int32_t>();
    token_of_row = token.to_vector<int32_t>();
    slot_of_row = slot.to_vector<int32_t>();
  }
  int64_t at(int64_t t, int64_t k) const { return row_of_pair[t * kTopK + k]; }

  Tensor row = Tensor::empty({kTokens, kTopK}, DType::kI32);
  std::vector<int32_t> row_of_pair, token_of_row, slot_of_row;
};

// Of 33 odd elements each: words of two bytes, farther apart than 2^32.
TEST(Large, StridedCopy) {
  const Periodic<bf16> x((int64_t{1} << 26) + 5, 64, 21);
  const Tensor y = x.tensor.slice(1, 1, 34).clone();
  for (const int64_t i : rows_to_look_at(y.size(0), x.columns)) {
    const std::vector<bf16> got = row_of<bf16>(y, i);
    for (int64_t j = 0; j < 33; ++j) {
      ASSERT_EQ(to_double(got[j]), x(i, j + 1)) << i << " " << j;
    }
  }
}

TEST(Large, DispatchForward) {
  const Rows8 r;
  const Periodic<bf16> x(r.kTokens, r.kWidth, 1);
  const Tensor x_R = Tensor::full({r.kRows, r.kWidth}, DType::kBf16, NAN);
  dispatch_forward<bf16>(launch(), read<bf16>(x.tensor), read<int32_t>(r.row),
                         write<bf16>(x_R));
  for (int64_t i : rows_to_look_at(r.kRows, r.kWidth)) {
    EXPECT_TRUE(Bitwise(row_of<bf16>(x_R, i),
                        row_of<bf16>(x.tensor, r.token_of_row[i])))
        << "row " << i;
  }
}

TEST(Large, DispatchBackward) {
  const Rows8 r;
  const Periodic<bf16> dx_R(r.kRows, r.kWidth, 1);
  const Tensor dx = Tensor::full({r.kTokens, r.kWidth}, DType::kBf16, NAN);
  dispatch_backward<bf16>(launch(), read<bf16>(dx_R.tensor),
                          read<int32_t>(r.row), write<bf16>(dx));
  for (int64_t t : rows_to_look_at(r.kTokens, r.kWidth)) {
    std::vector<double> expected(r.kWidth);
    for (int64_t k = 0; k < r.kTopK; ++k) {
      for (int64_t j = 0; j < r.kWidth; ++j) expected[j] += dx_R(r.at(t, k), j);
    }
    EXPECT_TRUE(Close(row_of<bf16>(dx, t), expected, {.sum_length = r.kTopK}))
        << "token " << t;
  }
}

TEST(Large, CombineForwardAndBackward) {
  const Rows8 r;
  const Periodic<bf16> x_R(r.kRows, r.kWidth, 1);
  const Periodic<bf16> dy(r.kTokens, r.kWidth, 2);
  const Periodic<float> weight(r.kTokens, r.kTopK, 3);
  const Tensor y = Tensor::full({r.kTokens, r.kWidth}, DType::kBf16, NAN);
  const Tensor dx_R = Tensor::full({r.kRows, r.kWidth}, DType::kBf16, NAN);
  const Tensor dweight = Tensor::full({r.kTokens, r.kTopK}, DType::kF32, NAN);
  combine_forward<bf16>(launch(), read<bf16>(x_R.tensor),
                        read<float>(weight.tensor), read<int32_t>(r.row),
                        write<bf16>(y));
  combine_backward<bf16>(launch(), read<bf16>(dy.tensor),
                         read<bf16>(x_R.tensor), read<float>(weight.tensor),
                         read<int32_t>(r.row), write<bf16>(dx_R),
                         write<float>(dweight));
  for (int64_t t : rows_to_look_at(r.kTokens, r.kWidth)) {
    std::vector<double> sum(r.kWidth), dots(r.kTopK);
    for (int64_t k = 0; k < r.kTopK; ++k) {
      for (int64_t j = 0; j < r.kWidth; ++j) {
        sum[j] += weight(t, k) * x_R(r.at(t, k), j);
        dots[k] += dy(t, j) * x_R(r.at(t, k), j);
      }
    }
    EXPECT_TRUE(Close(row_of<bf16>(y, t), sum, {.sum_length = r.kTopK}))
        << "token " << t;
    EXPECT_TRUE(
        Close(row_of<float>(dweight, t), dots, {.sum_length = r.kWidth}))
        << "token " << t;
  }
  for (int64_t i : rows_to_look_at(r.kRows, r.kWidth)) {
    const int64_t t = r.token_of_row[i], k = r.slot_of_row[i];
    std::vector<double> expected;
    for (int64_t j = 0; j < r.kWidth; ++j) {
      expected.push_back(weight(t, k) * dy(t, j));
    }
    EXPECT_TRUE(Close(row_of<bf16>(dx_R, i), expected)) << "row " << i;
  }
}

// Gate and up are halves of one tensor of 2^31 elements, and so are their
// gradients.
TEST(Large, SwigluForwardAndBackward) {
  constexpr int64_t kF = 2048, kRows = kWrap / (2 * kF) + 13;
  const Periodic<bf16> h(kRows, 2 * kF, 1), dy(kRows, kF, 2);
  const Tensor y = Tensor::full({kRows, kF}, DType::kBf16, NAN);
  const Tensor dh = Tensor::full({kRows, 2 * kF}, DType::kBf16, NAN);
  const auto in = read<bf16>(h.tensor);
  const auto gate = in.view().slice(1, 0, kF),
             up = in.view().slice(1, kF, 2 * kF);
  swiglu_forward<bf16>(launch(), gate, up, write<bf16>(y));
  const auto out = write<bf16>(dh);
  swiglu_backward<bf16>(launch(), read<bf16>(dy.tensor), gate, up,
                        out.view().slice(1, 0, kF),
                        out.view().slice(1, kF, 2 * kF));
  for (int64_t i : rows_to_look_at(kRows, 2 * kF)) {
    std::vector<double> expected, gradient(2 * kF);
    for (int64_t j = 0; j < kF; ++j) {
      const double g = h(i, j), u = h(i, kF + j);
      const double s = 1 / (1 + std::exp(-g));
      expected.push_back(float{bf16(static_cast<float>(g * s))} * u);
      gradient[j] = dy(i, j) * u * s * (1 + g * (1 - s));
      gradient[kF + j] = dy(i, j) * g * s;
    }
    // Two roundings where silu lies near a tie of bf16.
    EXPECT_TRUE(Close(row_of<bf16>(y, i), expected, {.scale = 2}))
        << "row " << i;
    EXPECT_TRUE(Close(row_of<bf16>(dh, i), gradient)) << "row " << i;
  }
}

// --- grouped matmul ----------------------------------------------------------

template <class T>
class LargeGroupedMatmul : public testing::Test {};
using Dtypes = testing::Types<bf16, float>;  // tensor cores, and plain
TYPED_TEST_SUITE(LargeGroupedMatmul, Dtypes);

// y has 2^31 elements; dy is as large.
TYPED_TEST(LargeGroupedMatmul, Rows) {
  using T = TypeParam;
  constexpr int64_t kF = 7168, kD = 64, kExperts = 512;
  constexpr int64_t kRows = kWrap / kF + 200;
  // Of about equal counts but for an expert without rows; some rows are left.
  std::vector<int32_t> offsets;
  for (int64_t e = 0; e <= kExperts; ++e) {
    offsets.push_back(static_cast<int32_t>((kRows - 7) * e / kExperts));
  }
  offsets[5] = offsets[4];
  const auto expert = [&](int64_t r) {
    return std::upper_bound(offsets.begin(), offsets.end(), r) -
           offsets.begin() - 1;
  };
  const Tensor offsets_E1 = Tensor::from(offsets, {kExperts + 1});
  const Periodic<T> x(kRows, kD, 1), dy(kRows, kF, 2);
  const Periodic<T> w(kExperts * kF, kD, 3);
  const Tensor w_EFD = w.tensor.view_as({kExperts, kF, kD});
  const auto weight = [&](int64_t e, int64_t f, int64_t d) {
    return w(e * kF + f, d);
  };
  const Tensor dw = Tensor::zeros({kExperts, kF, kD}, DType::kF32);
  {
    const Tensor y = Tensor::full({kRows, kF}, dtype_of<T>(), NAN);
    grouped_matmul_forward<T>(launch(), read<T>(x.tensor), read<T>(w_EFD),
                              read<int32_t>(offsets_E1), write<T>(y));
    EXPECT_EQ(
        grouped_matmul_forward_path(read<T>(x.tensor).view(),
                                    read<T>(w_EFD).view(), write<T>(y).view())
            .wgmma,
        (std::is_same_v<T, bf16>));
    for (int64_t r : rows_to_look_at(kRows - 7, kF)) {
      std::vector<double> expected(kF);
      for (int64_t f = 0; f < kF; ++f) {
        for (int64_t d = 0; d < kD; ++d) {
          expected[f] += x(r, d) * weight(expert(r), f, d);
        }
      }
      EXPECT_TRUE(Close(row_of<T>(y, r), expected, {.sum_length = kD}))
          << "row " << r;
    }
    // Rows of no expert stay as they are.
    EXPECT_TRUE(std::isnan(to_double(row_of<T>(y, kRows - 7)[0])));
    EXPECT_TRUE(std::isnan(to_double(row_of<T>(y, kRows - 1)[kF - 1])));
  }
  const Tensor dx = Tensor::full({kRows, kD}, dtype_of<T>(), NAN);
  grouped_matmul_dgrad<T>(launch(), read<T>(dy.tensor), read<T>(w_EFD),
                          read<int32_t>(offsets_E1), write<T>(dx));
  for (int64_t r : rows_to_look_at(kRows - 7, kF)) {
    std::vector<double> expected(kD);
    for (int64_t f = 0; f < kF; ++f) {
      for (int64_t d = 0; d < kD; ++d) {
        expected[d] += dy(r, f) * weight(expert(r), f, d);
      }
    }
    EXPECT_TRUE(Close(row_of<T>(dx, r), expected, {.sum_length = kF}))
        << "row " << r;
  }
  grouped_matmul_wgrad<T, float>(launch(), read<T>(dy.tensor),
                                 read<T>(x.tensor), read<int32_t>(offsets_E1),
                                 write<float>(dw));
  for (int64_t e : {int64_t{0}, int64_t{4}, kExperts / 2, kExperts - 1}) {
    // How often each of the repeated rows occurs.
    std::vector<double> times(x.kPeriod);
    for (int64_t r = offsets[e]; r < offsets[e + 1]; ++r)
      ++times[r % x.kPeriod];
    for (int64_t f : {int64_t{0}, int64_t{1000}, kF - 1}) {
      std::vector<double> expected(kD);
      for (int64_t p = 0; p < x.kPeriod; ++p) {
        for (int64_t d = 0; d < kD; ++d) {
          expected[d] += times[p] * dy(p, f) * x(p, d);
        }
      }
      const auto got =
          row_of<float>(dw.view_as({kExperts * kF, kD}), e * kF + f);
      EXPECT_TRUE(Close(got, expected, {.sum_length = kRows / kExperts}))
          << "expert " << e << ", row " << f;
    }
  }
}

// w and dw have more than 2^31 elements, and the last expert alone has rows.
TYPED_TEST(LargeGroupedMatmul, Weights) {
  using T = TypeParam;
  constexpr int64_t kF = 14336, kD = 4096, kExperts = 40, kRows = 150;
  static_assert((kExperts - 1) * kF * kD > kWrap);
  std::vector<int32_t> offsets(kExperts + 1);
  offsets.back() = kRows;
  const Tensor offsets_E1 = Tensor::from(offsets, {kExperts + 1});
  const Periodic<T> w(kExperts * kF, kD, 1, 0.1f);
  const Tensor w_EFD = w.tensor.view_as({kExperts, kF, kD});
  const int64_t last = (kExperts - 1) * kF;
  const Periodic<T> x(kRows, kD, 2), dy(kRows, kF, 3);
  const Tensor y = Tensor::full({kRows, kF}, dtype_of<T>(), NAN);
  const Tensor dx = Tensor::full({kRows, kD}, dtype_of<T>(), NAN);
  grouped_matmul_forward<T>(launch(), read<T>(x.tensor), read<T>(w_EFD),
                            read<int32_t>(offsets_E1), write<T>(y));
  grouped_matmul_dgrad<T>(launch(), read<T>(dy.tensor), read<T>(w_EFD),
                          read<int32_t>(offsets_E1), write<T>(dx));
  for (int64_t r : {int64_t{0}, int64_t{77}, kRows - 1}) {
    std::vector<double> products(w.kPeriod), expected(kF), gradient(kD);
    for (int64_t p = 0; p < w.kPeriod; ++p) {
      for (int64_t d = 0; d < kD; ++d) products[p] += x(r, d) * w(p, d);
    }
    std::vector<double> sums(w.kPeriod);
    for (int64_t f = 0; f < kF; ++f) {
      expected[f] = products[(last + f) % w.kPeriod];
      sums[(last + f) % w.kPeriod] += dy(r, f);
    }
    for (int64_t p = 0; p < w.kPeriod; ++p) {
      for (int64_t d = 0; d < kD; ++d) gradient[d] += sums[p] * w(p, d);
    }
    EXPECT_TRUE(Close(row_of<T>(y, r), expected, {.sum_length = kD})) << r;
    EXPECT_TRUE(Close(row_of<T>(dx, r), gradient, {.sum_length = kF})) << r;
  }
  const Tensor dw = Tensor::zeros({kExperts, kF, kD}, DType::kF32);
  grouped_matmul_wgrad<T, float>(launch(), read<T>(dy.tensor),
                                 read<T>(x.tensor), read<int32_t>(offsets_E1),
                                 write<float>(dw));
  const Tensor dw_rows = dw.view_as({kExperts * kF, kD});
  for (int64_t f : {int64_t{0}, int64_t{5000}, kF - 1}) {
    std::vector<double> expected(kD);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t d = 0; d < kD; ++d) expected[d] += dy(r, f) * x(r, d);
    }
    EXPECT_TRUE(Close(row_of<float>(dw_rows, last + f), expected,
                      {.sum_length = kRows}))
        << f;
  }
  // Every other expert's is exactly 0.
  for (int64_t e : {int64_t{0}, kExperts / 2, kExperts - 2}) {
    const auto values =
        dw_rows.slice(0, e * kF + kF - 1, e * kF + kF).to_vector<float>();
    EXPECT_EQ(values, std::vector<float>(kD, 0)) << e;
  }
}

// --- linear and cross-entropy ------------------------------------------------

TEST(Large, LinearCrossEntropy) {
  constexpr int64_t kVocabulary = 151'936, kWidth = 64;
  constexpr int64_t kTokens = kWrap / kVocabulary + 20;
  const Periodic<bf16> x(kTokens, kWidth, 1);
  const std::vector<bf16> w = normal<bf16>(kVocabulary * kWidth, 2, 0.2f);
  Parameter head(Shape{kVocabulary, kWidth});
  head.set_value("head", Tensor::from(w, head.shape));
  std::vector<int32_t> labels(kTokens);
  std::vector<float> weights(kTokens);
  for (int64_t t = 0; t < kTokens; ++t) {
    labels[t] = static_cast<int32_t>((t * 7919 + 5) % kVocabulary);
    weights[t] = 0.5f + static_cast<float>(t % 3);
  }
  labels[3] = -100;
  labels[kTokens - 1] = kVocabulary - 1;

  ParameterGradients gradients;
  Tape tape;
  const Tensor in = tape.input(x.tensor);
  const CrossEntropy out = record(tape, [&] {
    return linear_cross_entropy(in, head, Tensor::from(labels, {kTokens}),
                                Tensor::from(weights, {kTokens}));
  });
  const Tensor dx = tape.backward(out.loss, gradients)[0];
  // Logits of the rows that repeat, as the op rounds them.
  std::vector<std::vector<float>> logits(x.kPeriod);
  std::vector<double> lse(x.kPeriod);
  for (int64_t p = 0; p < x.kPeriod; ++p) {
    logits[p].resize(kVocabulary);
    double sum = 0;
    for (int64_t v = 0; v < kVocabulary; ++v) {
      float logit = 0;
      for (int64_t d = 0; d < kWidth; ++d) {
        logit += float{x.base[p * kWidth + d]} * float{w[v * kWidth + d]};
      }
      logits[p][v] = float{bf16(logit)};
      sum += std::exp(static_cast<double>(logits[p][v]));
    }
    lse[p] = std::log(sum);
  }
  // As the op keeps it: tokens repeat, and so would the error of a rounding.
  const auto rounded_dlogit = [&](int64_t t, int64_t v) {
    const int64_t p = t % x.kPeriod;
    const double exact = weights[t] * (std::exp(logits[p][v] - lse[p]) -
                                       (v == labels[t] ? 1 : 0));
    return to_double(bf16(static_cast<float>(exact)));
  };
  const std::vector<float> losses = out.token_loss_T.to_vector<float>();
  std::vector<bf16> got;  // as exact as the logits are
  std::vector<double> expected;
  for (int64_t t : rows_to_look_at(kTokens, kVocabulary)) {
    const int64_t p = t % x.kPeriod;
    const bool counts = labels[t] >= 0;
    got.push_back(bf16(losses[t]));
    expected.push_back(counts ? lse[p] - logits[p][labels[t]] : 0);

    std::vector<double> gradient(kWidth);
    for (int64_t v = 0; counts && v < kVocabulary; ++v) {
      const double dlogit = weights[t] * (std::exp(logits[p][v] - lse[p]) -
                                          (v == labels[t] ? 1 : 0));
      for (int64_t d = 0; d < kWidth; ++d) {
        gradient[d] += dlogit * to_double(w[v * kWidth + d]);
      }
    }
    EXPECT_TRUE(Close(row_of<bf16>(dx, t), gradient,
                      {.sum_length = kVocabulary, .scale = 2}))
        << "token " << t;
  }
  EXPECT_TRUE(Close(got, expected, {.scale = 2}));

  const Tensor dw = gradients.combined(head);
  for (int64_t v : {int64_t{0}, int64_t{7919 + 5}, kVocabulary - 1}) {
    std::vector<double> sum(kWidth);
    for (int64_t t = 0; t < kTokens; ++t) {
      if (labels[t] < 0) continue;
      const double dlogit = rounded_dlogit(t, v);
      for (int64_t d = 0; d < kWidth; ++d) sum[d] += dlogit * x(t, d);
    }
    // One that lies near a tie may be rounded the other way, for all tokens.
    std::vector<bf16> near;
    for (float value : row_of<float>(dw, v)) near.push_back(bf16(value));
    EXPECT_TRUE(Close(near, sum, {.sum_length = kTokens, .scale = 2}))
        << "row " << v;
  }
}

}  // namespace
}  // namespace tapeline
