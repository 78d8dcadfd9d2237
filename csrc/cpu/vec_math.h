// Vector versions of functions that C++ has only for single numbers: for float accurate to about one unit in the last
// place; for double, which is for tests of correctness, by the standard library.
#pragma once
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

constexpr float kRound = 0x1.8p23f;  // adding it removes the fraction

// r = v - n ln(2) with |r| <= ln(2) / 2, and in `shifted` kRound + n.
MEGATRON_INLINE FloatVec less_powers(FloatVec v, FloatVec& shifted) {
  shifted = v * 1.44269504f + kRound;
  FloatVec n = shifted - kRound;
  return v - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;  // ln(2) in two parts; n times the first one is exact
}

// v 2^n for n from -150 to 128, given n + kRound; also correct for subnormal results.
MEGATRON_INLINE FloatVec times_power(FloatVec v, FloatVec shifted) {
  SignedBits exponent = same_bits<SignedBits>(shifted) - same_bits<SignedBits>(FloatVec{} + kRound);
  SignedBits half = exponent >> 1;  // as two factors, each within the range of exponents
  auto power = [](SignedBits e) { return same_bits<FloatVec>((e + 127) << 23); };
  return v * power(half) * power(exponent - half);
}

// The same for n <= 0, in half the instructions: 2^(n + 64) is a normal number whose exponent bits follow from the
// lowest bits of `shifted`.
MEGATRON_INLINE FloatVec times_fraction(FloatVec v, FloatVec shifted) {
  return v * same_bits<FloatVec>((same_bits<SignedBits>(shifted) + (127 + 64)) << 23) * 0x1p-64f;
}

// A polynomial of r with these coefficients, from the highest power to the constant. Grouping them in pairs gives a
// polynomial of r^2 with half as many dependent steps: with AVX2 gelu takes 0.9 of the time.
MEGATRON_INLINE FloatVec in_pairs(FloatVec, FloatVec, FloatVec sum) { return sum; }
template <typename... Rest>
MEGATRON_INLINE FloatVec in_pairs(FloatVec r, FloatVec square, FloatVec sum, float odd, float even, Rest... rest) {
  return in_pairs(r, square, sum * square + (odd * r + even), rest...);
}
template <typename... Rest> MEGATRON_INLINE FloatVec polynomial(FloatVec r, float odd, float even, Rest... rest) {
  return in_pairs(r, r * r, odd * r + even, rest...);
}

// exp(v + low), where low is the rounding error of v, -1 < low <= 0, and -104 <= v <= 89, or with kDecays v <= 0. It is
// 2^n exp(r) with |r| <= ln(2) / 2, for which seven terms of the series have a relative error of 6e-9. NaN stays NaN.
template <bool kDecays> MEGATRON_INLINE FloatVec exp_within(FloatVec v, FloatVec low) {
  FloatVec shifted, r = less_powers(v, shifted) + low;
  FloatVec series =
      polynomial(r, 1 / 5040.0f, 1 / 720.0f, 1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 1 / 2.0f, 1.0f, 1.0f);
  return kDecays ? times_fraction(series, shifted) : times_power(series, shifted);
}

// v limited to `limit`; NaN stays NaN.
MEGATRON_INLINE FloatVec vec_at_most(FloatVec v, float limit) {
  return v > limit ? FloatVec{} + limit : v;
}
MEGATRON_INLINE FloatVec vec_at_least(FloatVec v, float limit) {
  return v < limit ? FloatVec{} + limit : v;
}

MEGATRON_INLINE DoubleVec vec_at_least(DoubleVec v, double limit) { return v < limit ? DoubleVec{} + limit : v; }

MEGATRON_INLINE FloatVec vec_exp(FloatVec v) {
  return exp_within<false>(vec_at_least(vec_at_most(v, 89.0f), -104.0f), FloatVec{});
}

// exp(-v) for v >= 0.
MEGATRON_INLINE DoubleVec vec_decay(DoubleVec v) { return vec_exp(-v); }
MEGATRON_INLINE FloatVec vec_decay(FloatVec v) { return exp_within<true>(vec_at_least(-v, -104.0f), FloatVec{}); }

// 2^v for v <= 0 with accuracy 8e-5, sufficient for results in 16 bits: 2^n 2^r, with n the integer below v, and 2^r by
// the minimax polynomial for 0 <= r <= 1.
MEGATRON_INLINE FloatVec vec_short_exp2(FloatVec v) {
  v = vec_at_least(v, -150.0f);
  FloatVec shifted = v - 0.5f + kRound, r = v - (shifted - kRound);
  FloatVec series = polynomial(r, 0.07802452f, 0.22606716f, 0.6958335f, 0.999925f);
  return times_fraction(series, shifted);
}

// |v|, limited to `limit`.
MEGATRON_INLINE FloatVec vec_abs(FloatVec v, float limit) {
  return vec_at_most(same_bits<FloatVec>(same_bits<Bits>(v) & 0x7fffffff), limit);
}
MEGATRON_INLINE DoubleVec vec_abs(DoubleVec v, double limit) {
  return each_lane(v, [=](double x) { return std::fabs(x) > limit ? limit : std::fabs(x); });
}

// exp(-v^2 / 2) for 0 <= v <= 40, the density of the normal distribution without its constant factor.
MEGATRON_INLINE DoubleVec vec_gauss(DoubleVec v) {
  return each_lane(v, [](double x) { return std::exp(x * x / -2); });
}
// The rounding error of v^2 would be magnified by v^2 / 2, so it is passed on. Without an instruction for it, the
// square is computed in two parts; the square of the upper 12 bits is exact.
MEGATRON_INLINE FloatVec vec_gauss(FloatVec v) {
  FloatVec upper = same_bits<FloatVec>(same_bits<Bits>(v) & 0xfffff000);
  FloatVec square = upper * upper, low = (v - upper) * (v + upper);
  return exp_within<true>(vec_at_least(square * -0.5f, -104.0f), low * -0.5f);
}

// The upper tail of the normal distribution, 1 - Phi(v). In float it is computed from vec_gauss(v), in double
// separately.
MEGATRON_INLINE DoubleVec vec_normal_tail(DoubleVec v, DoubleVec) {
  return each_lane(v, [](double x) { return std::erfc(x * std::sqrt(0.5)) / 2; });
}

MEGATRON_INLINE DoubleVec vec_sqrt(DoubleVec v) {
  return each_lane(v, [](double x) { return std::sqrt(x); });
}

// The processor's square root, which rounds correctly.
MEGATRON_INLINE FloatVec vec_sqrt(FloatVec v) {
  for (int lane = 0; lane < kFloats; ++lane) v[lane] = std::sqrt(v[lane]);
  return v;
}

// exp(v) for v <= 0, in two thirds of the instructions: subnormal results are 0. Of all polynomials of degree 5 that
// are 1 at 0, this one has the smallest relative error, at most 9.5e-8.
MEGATRON_INLINE FloatVec vec_exp_negative(FloatVec v) {
  v = vec_at_least(v, -88.0f);  // 2^-127, whose exponent is that of 0
  FloatVec shifted, r = less_powers(v, shifted);
  FloatVec series = polynomial(r, 0.008290308f, 0.04189798f, 0.16667637f, 0.4999915f, 0.9999997f, 1.0f);
  return series * same_bits<FloatVec>((same_bits<SignedBits>(shifted) + 127) << 23);  // kRound's bits are shifted out
}
MEGATRON_INLINE DoubleVec vec_exp_negative(DoubleVec v) { return vec_exp(v); }

}  // namespace megatron
