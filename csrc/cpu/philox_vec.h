// Philox for as many counters as a vector has pairs of 32-bit lanes.
#pragma once
#include "common/philox.h"
#include "cpu/vec.h"

namespace megatron {

typedef uint64_t WordVec __attribute__((vector_size(kVectorBytes)));
constexpr int kCounters = kVectorBytes / 8;

// One instruction where GCC 12 makes a whole 64-bit product of the general form.
#if defined(__AVX512F__)
template <> struct Product<WordVec> {
  static MEGATRON_INLINE WordVec of(WordVec w, uint32_t m) {
    return (WordVec)_mm512_mul_epu32((__m512i)w, _mm512_set1_epi64(m));
  }
};
#elif defined(__AVX2__)
template <> struct Product<WordVec> {
  static MEGATRON_INLINE WordVec of(WordVec w, uint32_t m) {
    return (WordVec)_mm256_mul_epu32((__m256i)w, _mm256_set1_epi64x(m));
  }
};
#endif

// The even lanes of two vectors in turns (a0 b0 a2 b2 ...), and the odd ones.
struct EvenPairs { static constexpr int of(int i, int count) { return i / 2 * 2 + i % 2 * count; } };
struct OddPairs { static constexpr int of(int i, int count) { return i / 2 * 2 + 1 + i % 2 * count; } };

// The counters' numbers from 0, the even lanes' before the odd lanes', so that `in_order` has little to do.
MEGATRON_INLINE WordVec counter_numbers() {
  WordVec numbers{};
  for (int lane = 0; lane < kCounters; ++lane) numbers[lane] = lane / 2 + lane % 2 * (kCounters / 2);
  return numbers;
}

// Writes the words of counter_numbers()' counters in their order, four of each, as eight halves.
MEGATRON_INLINE void in_order(const Four<WordVec>& words, uint16_t* to) {
  const WordVec first = (words.of[0] & 0xffffffff) | words.of[1] << 32;
  const WordVec second = (words.of[2] & 0xffffffff) | words.of[3] << 32;
  raw_store(to, picked<EvenPairs>(first, second), All{});
  raw_store(to + 4 * kCounters, picked<OddPairs>(first, second), All{});
}

}  // namespace megatron
