// bfloat16 and float16 as bits, one at a time, for code without native types for them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace megatron {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

inline uint32_t bits_of(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

inline float to_float(float v) { return v; }
inline float to_float(bf16 v) { return float_of(uint32_t(v.bits) << 16); }
inline float to_float(fp16 v) {
  const int exponent = v.bits >> 10 & 31, fraction = v.bits & 1023;
  float magnitude = exponent ? std::ldexp(float(1024 + fraction), exponent - 25) : std::ldexp(float(fraction), -24);
  if (exponent == 31) magnitude = fraction ? NAN : INFINITY;
  return v.bits >> 15 ? -magnitude : magnitude;
}

template <typename T> T from_float(float v);
template <> inline float from_float<float>(float v) { return v; }
template <> inline bf16 from_float<bf16>(float v) {
  const uint32_t bits = bits_of(v);
  if (std::isnan(v)) return {0x7fc0};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
// In units of the last bit, 2^-24 for subnormal numbers; nearbyint rounds to nearest, ties to even.
template <> inline fp16 from_float<fp16>(float v) {
  const uint16_t sign = bits_of(v) >> 16 & 0x8000;
  const float magnitude = std::fabs(v);
  if (std::isnan(v)) return {0x7e00};
  if (magnitude >= 65520.0f) return {uint16_t(sign | 0x7c00)};
  if (magnitude < 0x1p-14f) return {uint16_t(sign | uint16_t(std::nearbyint(std::ldexp(magnitude, 24))))};
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int units = int(std::nearbyint(std::ldexp(magnitude, 11 - exponent)));
  return {uint16_t(sign | ((exponent + 13) * 1024 + units))};
}

}  // namespace megatron
