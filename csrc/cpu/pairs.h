// Rows in pairs of vectors: with AVX2 sixteen bfloat16 numbers are unpacked and packed together in fewer instructions
// than twice eight, and what is computed of one vector does not wait for the other. That saves a fifth of the time.
#pragma once
#include "cpu/vec.h"

namespace megatron {

// Beside All and Some: the lanes of two vectors that follow one another, of which load() makes a Pair.
struct Both {};

// Lanes 0 to 3 and 8 to 11 of the two are in `first`, 4 to 7 and 12 to 15 in `second`: so AVX2 unpacks and packs.
struct Pair { FloatVec first, second; };
constexpr int kPair = 2 * kFloats;

// f(v), of each vector of a pair.
template <typename V, typename F> MEGATRON_INLINE V each_vector(V v, F f) { return f(v); }
template <typename F> MEGATRON_INLINE Pair each_vector(Pair v, F f) { return {f(v.first), f(v.second)}; }

MEGATRON_INLINE Pair operator+(Pair a, Pair b) { return {a.first + b.first, a.second + b.second}; }
MEGATRON_INLINE Pair operator-(Pair a, Pair b) { return {a.first - b.first, a.second - b.second}; }
MEGATRON_INLINE Pair operator*(Pair a, Pair b) { return {a.first * b.first, a.second * b.second}; }
MEGATRON_INLINE Pair operator-(Pair a, float b) { return {a.first - b, a.second - b}; }
MEGATRON_INLINE Pair operator*(Pair a, float b) { return {a.first * b, a.second * b}; }
MEGATRON_INLINE Pair operator*(float a, Pair b) { return b * a; }
MEGATRON_INLINE Pair& operator+=(Pair& a, Pair b) { return a = a + b; }
MEGATRON_INLINE Pair& operator*=(Pair& a, Pair b) { return a = a * b; }
MEGATRON_INLINE Pair only(Pair v, Both) { return v; }

#if defined(__AVX2__) && !defined(__AVX512F__)
template <typename T> constexpr bool kPairs = std::is_same_v<T, bf16>;

MEGATRON_INLINE __m256i raw_load(const bf16* p, Both) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
MEGATRON_INLINE void raw_stream(bf16* p, __m256i halves) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), halves);
}
MEGATRON_INLINE Pair load(const bf16* p, Both n) {
  const __m256i halves = raw_load(p, n), zero = _mm256_setzero_si256();
  return {(FloatVec)_mm256_unpacklo_epi16(zero, halves), (FloatVec)_mm256_unpackhi_epi16(zero, halves)};
}
MEGATRON_INLINE __m256i halves_of(Pair v) {
  return _mm256_packus_epi32((__m256i)rounded_halves(v.first), (__m256i)rounded_halves(v.second));
}
MEGATRON_INLINE void store(bf16* p, Pair v, Both) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves_of(v));
}
template <bool kStream> MEGATRON_INLINE void put(bf16* p, Pair v, Both n) {
  if constexpr (kStream) {
    raw_stream(p, halves_of(v));
  } else {
    store(p, v, n);
  }
}
MEGATRON_INLINE void stream_copy(bf16* to, const bf16* from, Both n) { raw_stream(to, raw_load(from, n)); }
#else
template <typename T> constexpr bool kPairs = false;
#endif

// Adds v to sums of columns, and reads them. They stay in a pair's order, for only loops in pairs over the same columns
// see them.
template <typename A, typename V, typename N> MEGATRON_INLINE void add_to(A* sums, V v, N n) {
  store(sums, load(sums, n) + v, n);
}
MEGATRON_INLINE void add_to(float* sums, Pair v, Both) {
  add_to(sums, v.first, All{});
  add_to(sums + kFloats, v.second, All{});
}
template <typename A, typename N> MEGATRON_INLINE auto sums_at(const A* sums, N n) { return load(sums, n); }
MEGATRON_INLINE Pair sums_at(const float* sums, Both) { return {load(sums, All{}), load(sums + kFloats, All{})}; }

// for_row(), where T has pairs with f(i, Both{}) for each of them and f(i, Some{n}) for the vectors of the rest.
template <typename T, typename F> MEGATRON_INLINE void for_row_in_pairs(int64_t columns, F f) {
  if constexpr (kPairs<T>) {
    int64_t i = 0;
    for (; i + kPair <= columns; i += kPair) f(i, Both{});
    for (; i < columns; i += kFloats) f(i, Some{static_cast<int>(std::min<int64_t>(columns - i, kFloats))});
  } else {
    for_row<T>(columns, f);
  }
}

// sum_row(), where T has pairs with f(i, Both{}, sums) for each of them, `sums` being pairs too, in two turns.
template <typename T, int K, typename F> MEGATRON_INLINE Sums<Wide<T>, K> sum_row_in_pairs(int64_t columns, F f) {
  if constexpr (kPairs<T>) {
    Pair sums[2][K] = {};
    FloatVec rest[K] = {};
    int64_t i = 0;
    for (; i + 2 * kPair <= columns; i += 2 * kPair) {
      f(i, Both{}, sums[0]);
      f(i + kPair, Both{}, sums[1]);
    }
    for_row_in_pairs<T>(columns - i, [&](int64_t k, auto n) {
      if constexpr (std::is_same_v<decltype(n), Both>) {
        f(i + k, n, sums[0]);
      } else {
        f(i + k, n, rest);
      }
    });
    Sums<float, K> totals{};
    for (int k = 0; k < K; ++k) {
      const Pair both = sums[0][k] + sums[1][k];
      totals.of[k] = sum_lanes<float>(both.first + both.second + rest[k]);
    }
    return totals;
  } else {
    return sum_row<T, K>(columns, f);
  }
}

}  // namespace megatron
