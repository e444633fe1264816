// Counter-based random numbers: a pure function of (seed, name, a, b, element).
//
// Element i of a stream is word i mod 4 of Philox4x32-10 at block i / 4 (Salmon
// et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Nothing is
// drawn in order, so a tensor has the same values whatever part of it is
// filled, by whichever rank or thread.
// `name` is the canonical name of a tensor, or a purpose ("batch", "sample");
// a and b tell steps, layers or micro-batches apart. The stream is chosen by
// the XXH3-128 of all four: 64 bits key the generator, 64 offset its counter.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "runtime/view.h"

namespace tapeline {

// Ten rounds on one 128-bit counter, least significant word first.
std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter,
                                   std::array<uint32_t, 2> key);

class Random {
 public:
  Random(uint64_t seed, std::string_view name, uint64_t a = 0, uint64_t b = 0);

  uint32_t bits(uint64_t i) const { return block(i / 4)[i % 4]; }
  // bits(2i) and bits(2i + 1) in one word.
  uint64_t bits64(uint64_t i) const;
  // [0, 1), multiples of 2^-24.
  float uniform(uint64_t i) const;
  // Uniform in [0, n), n >= 1, from bits64(i): the bias is below n * 2^-64.
  uint64_t below(uint64_t n, uint64_t i) const;
  // Standard normal (Box and Muller 1958) from bits 2j and 2j + 1, j = i / 2.
  float normal(uint64_t i) const;

  // Elements 4i .. 4i + 3 of bits() and of normal().
  std::array<uint32_t, 4> block(uint64_t i) const;
  std::array<float, 4> normal_block(uint64_t i) const;

 private:
  std::array<uint32_t, 2> key_;
  std::array<uint32_t, 2> offset_;
};

// out[j] = std * normal(first_element + j) of stream (seed, name), for a
// contiguous view; first_element is where the view begins in the whole tensor.
void fill_normal(View<float> out, float std, uint64_t seed,
                 std::string_view name, uint64_t first_element = 0);

}  // namespace tapeline
