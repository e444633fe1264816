// Element types, and bf16 with round-to-nearest-even conversion.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string_view>
#include <type_traits>

#include "runtime/check.h"

namespace tapeline {

enum class DType : uint8_t { kF32, kBf16, kF64, kI32, kI64, kU8 };

// The upper half of an fp32. Arithmetic happens in float. Constant expressions,
// so that device code may use them.
struct bf16 {
  uint16_t bits = 0;
  bf16() = default;
  // Round to nearest, ties to even; NaN stays NaN.
  constexpr explicit bf16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<uint16_t>((u >> 16) | 0x40u);
    } else {
      bits = static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
  }
  constexpr operator float() const {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};
static_assert(sizeof(bf16) == 2);

// What sums and statistics of T are kept in.
template <class T>
using Accumulator =
    std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 4;
    case DType::kBf16:
      return 2;
    case DType::kF64:
      return 8;
    case DType::kI32:
      return 4;
    case DType::kI64:
      return 8;
    case DType::kU8:
      return 1;
  }
  return 0;
}

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kBf16:
      return "bf16";
    case DType::kF64:
      return "f64";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
    case DType::kU8:
      return "u8";
  }
  return "?";
}

inline std::ostream& operator<<(std::ostream& out, DType dtype) {
  return out << name_of(dtype);
}

constexpr bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBf16 || dtype == DType::kF64;
}

template <class T>
constexpr DType dtype_of() {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, float>)
    return DType::kF32;
  else if constexpr (std::is_same_v<U, bf16>)
    return DType::kBf16;
  else if constexpr (std::is_same_v<U, double>)
    return DType::kF64;
  else if constexpr (std::is_same_v<U, int32_t>)
    return DType::kI32;
  else if constexpr (std::is_same_v<U, int64_t>)
    return DType::kI64;
  else {
    static_assert(std::is_same_v<U, uint8_t>, "no DType for this type");
    return DType::kU8;
  }
}

// Calls f.template operator()<T>() with the C++ type of a dtype.
template <class F>
decltype(auto) dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF32:
      return f.template operator()<float>();
    case DType::kBf16:
      return f.template operator()<bf16>();
    case DType::kF64:
      return f.template operator()<double>();
    case DType::kI32:
      return f.template operator()<int32_t>();
    case DType::kI64:
      return f.template operator()<int64_t>();
    case DType::kU8:
      break;
  }
  return f.template operator()<uint8_t>();
}

// The same for a float dtype.
template <class F>
decltype(auto) dispatch_float(DType dtype, F&& f) {
  CHECK(is_float(dtype)) << "needs a float dtype, got " << dtype;
  switch (dtype) {
    case DType::kBf16:
      return f.template operator()<bf16>();
    case DType::kF64:
      return f.template operator()<double>();
    default:
      return f.template operator()<float>();
  }
}

}  // namespace tapeline
