// 8-bit numbers and their scales, on the host and on the device.
#pragma once
#include <cstdint>
#include <cstring>

#include "common/both.h"

namespace megatron {

template <int kMantissaBits, int kExponentBias> struct Narrow {
  static constexpr int kMantissa = kMantissaBits, kBias = kExponentBias;
};
using NarrowE4M3 = Narrow<3, 7>;
using NarrowE5M2 = Narrow<2, 15>;
template <typename F> struct LargestOf { static constexpr float value = F::kMantissa == 3 ? 448.0f : 57344.0f; };

template <typename To, typename From> MEGATRON_BOTH To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// v clamped; NaN stays NaN. v is a number or a vector.
template <typename A, typename V> MEGATRON_BOTH V clamped(V v, A largest) {
  const V most = V{} + largest;
  v = v > most ? most : v;
  return v < -most ? -most : v;
}

// v, at most the largest number or NaN, rounded to nearest, ties to even, in the lowest 8 bits; a float as a uint32_t,
// or vectors of them. For subnormal results, v is added to a float whose last bit has the value of the smallest
// subnormal number; the sum has the rounded result in its lowest bits.
template <typename F, typename Word, typename V> MEGATRON_BOTH Word narrow_of(V v) {
  constexpr uint32_t kShift = 23 - F::kMantissa, kAligned = uint32_t(151 - F::kBias - F::kMantissa) << 23;
  const Word word = bits_as<Word>(v), magnitude = word & 0x7fffffffu;
  const V sum = bits_as<V>(magnitude) + bits_as<V>(Word{} + kAligned);
  const Word subnormal = bits_as<Word>(sum) - kAligned;
  const Word half = ((magnitude >> kShift) & 1u) + ((1u << (kShift - 1)) - 1);
  const Word normal = (magnitude - (uint32_t(127 - F::kBias) << 23) + half) >> kShift;
  const Word finite = magnitude < (Word{} + (uint32_t(128 - F::kBias) << 23)) ? subnormal : normal;
  const Word narrow = magnitude > (Word{} + 0x7f800000u) ? Word{} + 0x7fu : finite;
  return narrow | ((word >> 24) & 0x80u);
}

// largest / amax in float; `power_of_two`: rounded down to a power of two; NaN if amax is not finite. An amax below
// 1e-12, such as that of zeros, is replaced by 1e-12.
MEGATRON_BOTH float scale_of(double largest, double amax, bool power_of_two) {
  double scale = largest / (amax > 1e-12 ? amax : 1e-12);
  if (power_of_two) {  // clear the mantissa
    uint64_t bits;
    memcpy(&bits, &scale, sizeof bits);
    bits &= 0xfff0000000000000u;
    memcpy(&scale, &bits, sizeof scale);
  }
  return float(scale + amax * 0.0);
}

}  // namespace megatron
