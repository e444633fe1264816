#include "runtime/dtype.h"

#include <bit>
#include <cmath>
#include <sstream>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

float from_bits(uint32_t bits) { return std::bit_cast<float>(bits); }

// Rounding by comparing exact distances to the two neighbours, in double, which
// holds every float and every midpoint between bf16 values exactly.
uint16_t nearest_even(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t below = static_cast<uint16_t>(bits >> 16);  // towards zero
  const uint16_t above = static_cast<uint16_t>(below + 1);
  // Past the largest finite value the next one counts as 2^128.
  const auto magnitude = [](uint16_t b) {
    const uint16_t m = b & 0x7fff;
    return m == 0x7f80 ? std::ldexp(1.0, 128)
                       : static_cast<double>(from_bits(uint32_t{m} << 16));
  };
  const double x = std::abs(static_cast<double>(value));
  const double down = x - magnitude(below), up = magnitude(above) - x;
  if (down != up) return down < up ? below : above;
  return below % 2 == 0 ? below : above;
}

TEST(Bf16, RoundsToNearestEvenAroundEveryValue) {
  // For each of the 2^16 patterns: the value, its neighbours as floats, and the
  // surroundings of the midpoint to the next one.
  int64_t checked = 0;
  for (uint32_t high = 0; high < 0x10000; ++high) {
    if ((high & 0x7f80) == 0x7f80) continue;  // infinities and NaN: below
    for (uint32_t low : {0x0000u, 0x0001u, 0x4000u, 0x7fffu, 0x8000u, 0x8001u,
                         0xc000u, 0xffffu}) {
      const float value = from_bits(high << 16 | low);
      ASSERT_EQ(bf16(value).bits, nearest_even(value))
          << std::hex << high << " " << low;
      ++checked;
    }
  }
  EXPECT_EQ(checked, (0x10000 - 2 * 128) * 8);
}

TEST(Bf16, ValuesItHoldsComeBackUnchanged) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    bf16 value;
    value.bits = static_cast<uint16_t>(bits);
    const float wide = value;
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(static_cast<float>(bf16(wide))));
    } else {
      ASSERT_EQ(bf16(wide).bits, bits);
    }
  }
}

TEST(Bf16, InfinityAndNaNStay) {
  EXPECT_EQ(bf16(INFINITY).bits, 0x7f80);
  EXPECT_EQ(bf16(-INFINITY).bits, 0xff80);
  EXPECT_EQ(bf16(from_bits(0x7f7fffff)).bits, 0x7f80) << "overflow rounds up";
  // A NaN whose payload lies in the half that is cut must not become infinity.
  for (uint32_t nan : {0x7f800001u, 0x7f80ffffu, 0x7fc00000u, 0x7fffffffu,
                       0xff800001u, 0xffffffffu}) {
    const float back = bf16(from_bits(nan));
    EXPECT_TRUE(std::isnan(back)) << std::hex << nan;
    EXPECT_EQ(std::signbit(back), nan >> 31 == 1);
  }
}

TEST(DType, SizesNamesAndTypesAgree) {
  const auto check = []<class T>(T, std::string_view name, bool floating) {
    const DType dtype = dtype_of<T>();
    EXPECT_EQ(size_of(dtype), sizeof(T));
    EXPECT_EQ(name_of(dtype), name);
    EXPECT_EQ(is_float(dtype), floating);
    EXPECT_EQ(dtype_of<const T>(), dtype);
    std::ostringstream out;
    out << dtype;
    EXPECT_EQ(out.str(), name);
  };
  check(float{}, "f32", true);
  check(bf16{}, "bf16", true);
  check(double{}, "f64", true);
  check(int32_t{}, "i32", false);
  check(int64_t{}, "i64", false);
  check(uint8_t{}, "u8", false);
}

TEST(DType, DispatchCallsWithTheType) {
  const auto size = []<class T>() { return sizeof(T); };
  EXPECT_EQ(dispatch_float(DType::kF32, size), 4u);
  EXPECT_EQ(dispatch_float(DType::kBf16, size), 2u);
  EXPECT_EQ(dispatch_float(DType::kF64, size), 8u);
  for (DType dtype : {DType::kF32, DType::kBf16, DType::kF64, DType::kI32,
                      DType::kI64, DType::kU8}) {
    EXPECT_EQ(dispatch(dtype, []<class T>() { return dtype_of<T>(); }), dtype);
  }
}

TEST(DTypeDeathTest, DispatchRefusesIntegers) {
  EXPECT_DEATH(dispatch_float(DType::kI32, []<class T>() {}),
               "needs a float dtype, got i32");
}

}  // namespace
}  // namespace tapeline
