// XXH3-128 of bytes: the fingerprint of files, gradients and random streams.
//
// Not cryptographic: it finds damage, not forgery. The same bytes give the same
// hash in one call or in many, on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace tapeline {

struct Hash128 {
  uint64_t high = 0;
  uint64_t low = 0;
  friend bool operator==(const Hash128&, const Hash128&) = default;
};

Hash128 hash_bytes(const void* data, size_t bytes);

// 32 lower-case hexadecimal digits, high word first, as `xxh128sum` prints.
std::string to_hex(const Hash128& hash);

// The hash of everything passed to update() so far.
class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(Hasher&&) noexcept;
  Hasher& operator=(Hasher&&) noexcept;

  void update(const void* data, size_t bytes);
  Hash128 digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tapeline
