// Normal values by counting: the i-th of a key, whoever asks and in any order.
#pragma once

#include <cmath>
#include <cstdint>

namespace tapeline::bench {

// Mixes 64 bits (Steele, Lea and Flood 2014, splitmix64's finalizer).
constexpr uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Two uniform numbers of 24 bits, one of them never 0.
struct Uniforms {
  float a, b;  // a in (0, 1], b in [0, 1)
};
constexpr Uniforms uniforms_at(uint64_t key, uint64_t i) {
  const uint64_t bits = mixed(mixed(key) + (i + 1) * 0x9e3779b97f4a7c15u);
  constexpr float kStep = 1.0f / (1 << 24);
  return {static_cast<float>((bits >> 40) + 1) * kStep,
          static_cast<float>(bits & 0xffffff) * kStep};
}

// Box and Muller 1958.
inline float normal_at(uint64_t key, uint64_t i) {
  const Uniforms u = uniforms_at(key, i);
  return std::sqrt(-2 * std::log(u.a)) * std::cos(6.2831853f * u.b);
}

}  // namespace tapeline::bench
