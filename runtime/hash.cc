#include "runtime/hash.h"

#include "xxhash.h"

namespace tapeline {
namespace {

Hash128 from_xxh(const XXH128_hash_t& hash) {
  return {hash.high64, hash.low64};
}

}  // namespace

struct Hasher::State {
  XXH3_state_t* xxh = XXH3_createState();
  ~State() { XXH3_freeState(xxh); }
};

Hasher::Hasher() : state_(std::make_unique<State>()) {
  XXH3_128bits_reset(state_->xxh);
}
Hasher::~Hasher() = default;
Hasher::Hasher(Hasher&&) noexcept = default;
Hasher& Hasher::operator=(Hasher&&) noexcept = default;

void Hasher::update(const void* data, size_t bytes) {
  XXH3_128bits_update(state_->xxh, data, bytes);
}

Hash128 Hasher::digest() const {
  return from_xxh(XXH3_128bits_digest(state_->xxh));
}

Hash128 hash_bytes(const void* data, size_t bytes) {
  return from_xxh(XXH3_128bits(data, bytes));
}

std::string to_hex(const Hash128& hash) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text(32, '0');
  for (int i = 0; i < 16; ++i) {
    text[15 - i] = kDigits[(hash.high >> (4 * i)) & 15];
    text[31 - i] = kDigits[(hash.low >> (4 * i)) & 15];
  }
  return text;
}

}  // namespace tapeline
