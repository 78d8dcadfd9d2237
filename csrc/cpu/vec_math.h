// Functions that C++ has for single numbers only, lane by lane. For float to about one unit of the last place; for
// double, which serves proofs and not speed, by the standard library.
#pragma once
#include <initializer_list>

#include "cpu/vec.h"

namespace megatron {

typedef int32_t SignedBits __attribute__((vector_size(kVectorBytes)));

template <typename F> MEGATRON_INLINE DoubleVec each_lane(DoubleVec v, F f) {
  for (int lane = 0; lane < kLanes<double>; ++lane) v[lane] = f(v[lane]);
  return v;
}

MEGATRON_INLINE DoubleVec vec_exp(DoubleVec v) {
  return each_lane(v, [](double x) { return std::exp(x); });
}

constexpr float kRound = 0x1.8p23f;  // what is added to it loses its fraction

// r = v - n ln(2) with |r| <= ln(2) / 2, and in `shifted` kRound + n.
MEGATRON_INLINE FloatVec less_powers(FloatVec v, FloatVec& shifted) {
  shifted = v * 1.44269504f + kRound;
  FloatVec n = shifted - kRound;
  return v - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;  // ln(2) in two parts, n times the first of which is exact
}

// exp(v) = 2^n exp(r) with |r| <= ln(2) / 2, where seven terms of the series leave a relative error of 6e-9. Infinite and
// subnormal results come out as they should, and NaN stays NaN.
MEGATRON_INLINE FloatVec vec_exp(FloatVec v) {
  v = v > 89.0f ? FloatVec{} + 89.0f : v;
  v = v < -104.0f ? FloatVec{} - 104.0f : v;
  FloatVec shifted, r = less_powers(v, shifted);
  FloatVec series = FloatVec{} + 1 / 5040.0f;
  for (float term : {1 / 720.0f, 1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 1 / 2.0f, 1.0f, 1.0f}) series = series * r + term;
  SignedBits exponent = same_bits<SignedBits>(shifted) - same_bits<SignedBits>(FloatVec{} + kRound);
  SignedBits half = exponent >> 1;  // 2^n in two factors, because n goes from -150 to 128
  auto power = [](SignedBits e) { return same_bits<FloatVec>((e + 127) << 23); };
  return series * power(half) * power(exponent - half);
}

MEGATRON_INLINE DoubleVec vec_sqrt(DoubleVec v) {
  return each_lane(v, [](double x) { return std::sqrt(x); });
}

// The processor's own, which rounds correctly.
MEGATRON_INLINE FloatVec vec_sqrt(FloatVec v) {
#if defined(__AVX512F__)
  return (FloatVec)_mm512_sqrt_ps((__m512)v);
#elif defined(__AVX2__)
  return (FloatVec)_mm256_sqrt_ps((__m256)v);
#else
  for (int lane = 0; lane < kFloats; ++lane) v[lane] = std::sqrt(v[lane]);
  return v;
#endif
}

// exp(v) for v <= 0, with two thirds of the instructions: what is no normal number any more is 0. Of the polynomials of
// degree 5 that are 1 at 0 this has the smallest relative error, 9.5e-8 at most.
MEGATRON_INLINE FloatVec vec_exp_negative(FloatVec v) {
  v = v < -88.0f ? FloatVec{} - 88.0f : v;  // 2^-127, whose exponent is that of 0
  FloatVec shifted, r = less_powers(v, shifted);
  FloatVec series = FloatVec{} + 0.008290308f;
  for (float term : {0.04189798f, 0.16667637f, 0.4999915f, 0.9999997f, 1.0f}) series = series * r + term;
  return series * same_bits<FloatVec>((same_bits<SignedBits>(shifted) + 127) << 23);  // kRound's own bits are shifted out
}
MEGATRON_INLINE DoubleVec vec_exp_negative(DoubleVec v) { return vec_exp(v); }

}  // namespace megatron
