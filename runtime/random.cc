#include "runtime/random.h"

#include <cmath>
#include <numbers>
#include <string>

#include "runtime/check.h"
#include "runtime/hash.h"

namespace tapeline {
namespace {

void append(std::string& key, uint64_t value) {
  for (int i = 0; i < 8; ++i) key += static_cast<char>(value >> (8 * i));
}

// Two uniform words to two independent normals. In double, so that the last
// bit of a platform's log and cos almost never shows in the float.
void box_muller(uint32_t u, uint32_t v, float* out) {
  constexpr double kStep = 0x1p-32;
  const double radius = std::sqrt(-2.0 * std::log((u + 0.5) * kStep));
  const double angle = 2.0 * std::numbers::pi * (v * kStep);
  out[0] = static_cast<float>(radius * std::cos(angle));
  out[1] = static_cast<float>(radius * std::sin(angle));
}

}  // namespace

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter,
                                   std::array<uint32_t, 2> key) {
  // Multipliers and Weyl increments of the paper, table 2 and section 4.3.
  constexpr uint64_t kMultiply0 = 0xD2511F53, kMultiply1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = kMultiply0 * counter[0];
    const uint64_t p1 = kMultiply1 * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(p0)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return counter;
}

Random::Random(uint64_t seed, std::string_view name, uint64_t a, uint64_t b) {
  std::string key;
  append(key, seed);
  append(key, a);
  append(key, b);
  key += name;
  const Hash128 hash = hash_bytes(key.data(), key.size());
  key_ = {static_cast<uint32_t>(hash.low),
          static_cast<uint32_t>(hash.low >> 32)};
  offset_ = {static_cast<uint32_t>(hash.high),
             static_cast<uint32_t>(hash.high >> 32)};
}

std::array<uint32_t, 4> Random::block(uint64_t i) const {
  return philox4x32({static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32),
                     offset_[0], offset_[1]},
                    key_);
}

std::array<float, 4> Random::normal_block(uint64_t i) const {
  const std::array<uint32_t, 4> words = block(i);
  std::array<float, 4> out;
  box_muller(words[0], words[1], &out[0]);
  box_muller(words[2], words[3], &out[2]);
  return out;
}

uint64_t Random::bits64(uint64_t i) const {
  const std::array<uint32_t, 4> words = block(i / 2);
  const int first = static_cast<int>(i % 2) * 2;
  return words[first] | static_cast<uint64_t>(words[first + 1]) << 32;
}

float Random::uniform(uint64_t i) const {
  return static_cast<float>(bits(i) >> 8) * 0x1p-24f;
}

uint64_t Random::below(uint64_t n, uint64_t i) const {
  CHECK_GT(n, 0u);
  const auto product = static_cast<unsigned __int128>(bits64(i)) * n;
  return static_cast<uint64_t>(product >> 64);
}

float Random::normal(uint64_t i) const { return normal_block(i / 4)[i % 4]; }

void fill_normal(View<float> out, float std, uint64_t seed,
                 std::string_view name, uint64_t first_element) {
  CHECK(out.contiguous()) << "[fill_normal] view of " << out.shape
                          << " with strides " << out.strides;
  const Random random(seed, name);
  const auto n = static_cast<uint64_t>(out.elements());
  std::array<float, 4> block{};
  for (uint64_t j = 0; j < n; ++j) {
    const uint64_t i = first_element + j;
    if (j == 0 || i % 4 == 0) block = random.normal_block(i / 4);
    out.data[j] = std * block[i % 4];
  }
}

}  // namespace tapeline
