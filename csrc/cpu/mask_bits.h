// Masks as bits: channel i of a row is bit i % 8 of byte i / 8.
#pragma once
#include "cpu/pairs.h"
#include "cpu/philox_vec.h"

namespace megatron {

// How many halves become bits together, and those: 1 where a half is at least `threshold`.
#if defined(__AVX512F__)
constexpr int kPacked = 32;
MEGATRON_INLINE void pack_bits(const uint16_t* halves, uint32_t threshold, uint8_t* bits) {
  const __m512i all = _mm512_loadu_si512(halves);
  const uint32_t packed = _mm512_cmpge_epu16_mask(all, _mm512_set1_epi16(static_cast<short>(threshold)));
  std::memcpy(bits, &packed, sizeof packed);
}
#elif defined(__AVX2__)
constexpr int kPacked = 32;
MEGATRON_INLINE void pack_bits(const uint16_t* halves, uint32_t threshold, uint8_t* bits) {
  const __m256i least = _mm256_set1_epi16(static_cast<short>(threshold));
  auto at_least = [&](int i) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves + i));
    return _mm256_cmpeq_epi16(_mm256_max_epu16(v, least), v);
  };
  // The packing leaves the quarters in the order 0 2 1 3.
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(at_least(0), at_least(16)), 0xd8);
  const int packed = _mm256_movemask_epi8(bytes);
  std::memcpy(bits, &packed, sizeof packed);
}
#else
constexpr int kPacked = 8;
MEGATRON_INLINE void pack_bits(const uint16_t* halves, uint32_t threshold, uint8_t* bits) {
  uint32_t packed = 0;
  for (int i = 0; i < 8; ++i) packed |= static_cast<uint32_t>(halves[i] >= threshold) << i;
  *bits = static_cast<uint8_t>(packed);
}
#endif

// The bits of as many channels as V has lanes, from i on, which is a multiple of them.
template <typename V> MEGATRON_INLINE uint32_t bits_at(const uint8_t* bits, int64_t i) {
  constexpr int kCount = sizeof(V) / sizeof(V{}[0]);
  if constexpr (kCount == 16) return bits[i / 8] | bits[i / 8 + 1] << 8;
  return bits[i / 8] >> i % 8;
}

// The lanes of v whose bits are 1, the others zero.
MEGATRON_INLINE FloatVec where_bits(const uint8_t* bits, int64_t i, FloatVec v) {
#if defined(__AVX512F__)
  return (FloatVec)_mm512_maskz_mov_ps(bits_at<FloatVec>(bits, i), (__m512)v);
#else
  Bits own{};
  for (int lane = 0; lane < kFloats; ++lane) own[lane] = 1u << lane;
  return (own & bits_at<FloatVec>(bits, i)) != 0 ? v : FloatVec{};
#endif
}
// A pair's bits are taken from memory to all places at once, which half of the words of 32 bits do not need.
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes)));
MEGATRON_INLINE Pair where_bits(const uint8_t* bits, int64_t i, Pair v) {
  Bits own{};  // of `first`; those of `second` follow them by four
  for (int lane = 0; lane < kFloats; ++lane) own[lane] = 1u << (lane + lane / 4 * 4);
  uint16_t word;
  std::memcpy(&word, bits + i / 8, sizeof word);
  const Bits all = same_bits<Bits>(Halves{} + word);
  return {(own & all) != 0 ? v.first : FloatVec{}, (own << 4 & all) != 0 ? v.second : FloatVec{}};
}
MEGATRON_INLINE DoubleVec where_bits(const uint8_t* bits, int64_t i, DoubleVec v) {
  for (int lane = 0; lane < kLanes<double>; ++lane) v[lane] = bits_at<DoubleVec>(bits, i) >> lane & 1 ? v[lane] : 0.0;
  return v;
}

}  // namespace megatron
