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

// largest / amax / divisor in float; `power_of_two`: rounded down to a power of two; NaN if amax is not finite. An amax
// below 1e-12, such as that of zeros, is replaced by 1e-12.
MEGATRON_BOTH float scale_of(double largest, double amax, bool power_of_two, double divisor = 1.0) {
  double scale = largest / (amax > 1e-12 ? amax : 1e-12) / divisor;
  if (power_of_two) {  // clear the mantissa
    uint64_t bits;
    memcpy(&bits, &scale, sizeof bits);
    bits &= 0xfff0000000000000u;
    memcpy(&scale, &bits, sizeof scale);
  }
  return float(scale + amax * 0.0);
}

// The arguments of megatron_fp8_roll, and its work for number i.
struct Roll {
  int64_t steps;
  bool takes_largest;
  double divisor, largest[3];
  float *latest, *history, *scale, *inverse;

  MEGATRON_BOTH void step(int64_t i) const {
    const int64_t role = i % 3;
    float* entries = history + i / 3 * steps * 3 + role;
    float amax = latest[i];
    if (!(amax > 0.0f && amax <= 3.402823466e+38f)) amax = entries[0];
    float most = amax;
    for (int64_t s = steps - 1; s > 0; --s) {
      const float earlier = entries[(s - 1) * 3];
      entries[s * 3] = earlier;
      if (takes_largest && earlier > most) most = earlier;
    }
    entries[0] = amax;
    latest[i] = 0.0f;
    const float by = most > 0.0f ? scale_of(largest[role], most, false, divisor) : 1.0f;
    scale[i] = by;
    inverse[i] = 1.0f / by;
  }
};

}  // namespace megatron
