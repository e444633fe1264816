// Rotary position embedding: pairs of elements of a head turn by an angle that
// is the token's position times the pair's frequency.     Su et al. 2021
//
//   y0[j] = x0[j] cos[t, j] - x1[j] sin[t, j]      j = 0 .. R/2 - 1
//   y1[j] = x1[j] cos[t, j] + x0[j] sin[t, j]
// x holds the pairs interleaved, (x0, x1) = (x[2j], x[2j+1]), or as halves,
// (x[j], x[j+R/2]). y is always written as halves, [all y0 | all y1], as
// Hugging Face's implementations do: dot products of two rotated heads are the
// same in either order.
//
//   x, y, dy, dx [T, H, R] T    cos, sin [T, R/2] f32
//   forward overwrites y; backward overwrites dx (the turn back, into x's
//   order)
// T in {float, bf16, double}; arithmetic in Accumulator<T>, rounded once. Last
// strides are 1, those of T and H any: slices of a wider tensor work. Outputs
// overlap no input (CHECKed for the same address). Memory-bound.
#pragma once

#include <vector>

#include "kernels/kernel.h"

namespace tapeline {

struct RopeOptions {
  enum Scaling {
    kDefault,
    kYarn,    // Peng et al. 2023, by pair index as in Hugging Face
    kLlama3,  // Llama 3.1: piecewise by wavelength
  };

  double theta = 10000;
  int dim = 64;  // R, even
  Scaling scaling = kDefault;
  double factor = 1;                  // context is extended by this
  int64_t original_max_position = 0;  // the context before
  // YaRN: pairs that turn more than beta_fast times in the old context keep
  // their frequency, those that turn less than beta_slow times are slowed by
  // factor, with a ramp between.
  double beta_fast = 32, beta_slow = 1;
  bool truncate = true;                   // the ramp's ends to whole pairs
  double mscale = 0, mscale_all_dim = 0;  // 0: not given
  double attention_factor = 0;            // 0: by YaRN's rule
  // Llama 3: wavelengths above original / low are slowed, those below
  // original / high keep, with a ramp between.
  double low_freq_factor = 1, high_freq_factor = 4;
};

// R/2 frequencies in radians per position, fastest first. The ladder
// theta^(-2j/R) is rounded to f32 after each operation, as the libraries form
// it: one ulp there is 0.05 radians at position 10^6, so parity over long
// contexts needs the same roundings. Scalings are applied in f64, rounded once.
std::vector<double> rope_inverse_frequencies(const RopeOptions& options);

// What cos and sin are multiplied by: 1, except under YaRN
//   m(mscale) / m(mscale_all_dim) if both are given, else m(1),
//   m(s) = 0.1 s ln(factor) + 1, or 1 for factor <= 1.
double rope_attention_factor(const RopeOptions& options);

// cos and sin of positions[t] * inverse_frequencies[j], times `factor`. The
// angle is an f32 product, again as the libraries form it; its cosine is exact.
void rope_table(Launch l, View<const int32_t> positions_T,
                const std::vector<double>& inverse_frequencies, double factor,
                View<float> cos_TR2, View<float> sin_TR2);

template <class T>
void rope_forward(Launch l, View<const T> x_THR, View<const float> cos_TR2,
                  View<const float> sin_TR2, bool interleaved, View<T> y_THR);

template <class T>
void rope_backward(Launch l, View<const T> dy_THR, View<const float> cos_TR2,
                   View<const float> sin_TR2, bool interleaved, View<T> dx_THR);

Cost rope_cost(int64_t t, int64_t h, int64_t r, int64_t element_bytes);

}  // namespace tapeline
