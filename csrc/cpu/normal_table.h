// The tail of the normal distribution for results of 16 bits, from tables in registers.
#pragma once
#include "cpu/vec.h"

#if defined(__AVX512F__)
namespace megatron {

// A function on 0 <= a <= 14 by 32 parabolas, each in a piece around a multiple of the step, where it meets the
// function at the Chebyshev points.
struct Parabolas {
  static constexpr int kPieces = 32;
  static constexpr double kEnd = 14.25;  // so that 14 is in the last piece
  alignas(64) float square[kPieces], linear[kPieces], constant[kPieces];

  template <typename F> explicit Parabolas(F function) {
    for (int piece = 0; piece < kPieces; ++piece) {
      const double step = kEnd / kPieces, middle = piece * step, reach = step / 2 * std::sqrt(0.75);
      const double low = function(middle - reach), at = function(middle), high = function(middle + reach);
      const double curve = (low - 2 * at + high) / (2 * reach * reach), slope = (high - low) / (2 * reach);
      square[piece] = static_cast<float>(curve);
      linear[piece] = static_cast<float>(slope - 2 * curve * middle);
      constant[piece] = static_cast<float>(at - slope * middle + curve * middle * middle);
    }
  }

  MEGATRON_INLINE FloatVec operator()(FloatVec a) const {
    const __m512i piece = (__m512i)(a * float(kPieces / kEnd) + 0x1.8p23f);  // rounded, in the lowest bits
    auto pick = [=](const float* of) {
      return (FloatVec)_mm512_permutex2var_ps(_mm512_load_ps(of), piece, _mm512_load_ps(of + 16));
    };
    return (pick(square) * a + pick(linear)) * a + pick(constant);
  }
};

inline double normal_tail(double a) { return std::erfc(a * std::sqrt(0.5)) / 2; }

// -log2(Phi(-a)), and what the slope of a Phi(-a) is of Phi(-a): 1 - a phi(a) / Phi(-a). Both are nearly parabolas.
inline const Parabolas kTailExponent([](double a) { return -std::log2(normal_tail(a)); });
inline const Parabolas kTailSlope([](double a) {
  const double density = std::exp(a * a / -2) / std::sqrt(8 * std::atan(1));
  return 1 - a * density / normal_tail(a);
});

// They take the place of activation_math.h's, which are for all processors, and of a third of gelu's time.
MEGATRON_INLINE FloatVec vec_tail_exponent(FloatVec a) { return kTailExponent(a); }
MEGATRON_INLINE FloatVec vec_tail_slope(FloatVec a, FloatVec tail) { return kTailSlope(a) * tail; }

}  // namespace megatron
#endif
