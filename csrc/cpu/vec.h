// Vectors as wide as the processor's registers, loads and stores that convert, and sums over a row.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "common/half.h"
#include "common/interface.h"

#define MEGATRON_INLINE inline __attribute__((always_inline))

namespace megatron {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// All arithmetic on T is done in Wide<T>.
template <typename T> struct WideOf { using type = float; };
template <> struct WideOf<double> { using type = double; };
template <typename T> using Wide = typename WideOf<T>::type;

constexpr int kFloats = kVectorBytes / 4;
typedef float FloatVec __attribute__((vector_size(kVectorBytes)));
typedef double DoubleVec __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
typedef uint16_t HalfBits __attribute__((vector_size(kVectorBytes / 2)));

template <typename T> struct VecOf { using type = FloatVec; };
template <> struct VecOf<double> { using type = DoubleVec; };
template <typename T> using Vec = typename VecOf<T>::type;
template <typename T> constexpr int kLanes = kVectorBytes / sizeof(Wide<T>);

// How many lanes of a vector a load or store touches: All, or the `n` of a row's end (others load as zero).
struct All {};
struct Some { int n; };

template <typename V, typename T> MEGATRON_INLINE V raw_load(const T* p, All) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
// AVX-512 has masks for them; memcpy of a few bytes, and what waits for it, would take a third of a row of 512.
template <typename V, typename T> MEGATRON_INLINE V raw_load(const T* p, Some some) {
#if defined(__AVX512F__)
  const uint32_t lanes = (1u << some.n) - 1;
  if constexpr (sizeof(V) == 64 && sizeof(T) == 4) return (V)_mm512_maskz_loadu_epi32(lanes, p);
  if constexpr (sizeof(V) == 32 && sizeof(T) == 2) return (V)_mm256_maskz_loadu_epi16(lanes, p);
  if constexpr (sizeof(V) == 16 && sizeof(T) == 1) return (V)_mm_maskz_loadu_epi8(lanes, p);
#endif
  V v{};
  std::memcpy(&v, p, some.n * sizeof(T));
  return v;
}
template <typename V, typename T> MEGATRON_INLINE void raw_store(T* p, V v, All) { std::memcpy(p, &v, sizeof v); }
template <typename V, typename T> MEGATRON_INLINE void raw_store(T* p, V v, Some some) {
#if defined(__AVX512F__)
  const uint32_t lanes = (1u << some.n) - 1;
  if constexpr (sizeof(V) == 64 && sizeof(T) == 4) return _mm512_mask_storeu_epi32(p, lanes, (__m512i)v);
  if constexpr (sizeof(V) == 32 && sizeof(T) == 2) return _mm256_mask_storeu_epi16(p, lanes, (__m256i)v);
#endif
  std::memcpy(p, &v, some.n * sizeof(T));
}

template <typename To, typename From> MEGATRON_INLINE To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// 16 bits of each lane, widened with zeros, and back, where the upper 16 are zero. For the wider registers GCC 12 makes
// four instructions of the first and a table look-up of the second where one or two do.
MEGATRON_INLINE Bits widened(HalfBits v) {
#if defined(__AVX512F__)
  return (Bits)_mm512_cvtepu16_epi32((__m256i)v);
#elif defined(__AVX2__)
  return (Bits)_mm256_cvtepu16_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, Bits);
#endif
}
MEGATRON_INLINE HalfBits narrowed(Bits v) {
#if defined(__AVX512F__)
  return (HalfBits)_mm512_cvtepi32_epi16((__m512i)v);
#elif defined(__AVX2__)
  return (HalfBits)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
#else
  return __builtin_convertvector(v, HalfBits);
#endif
}

template <typename N> MEGATRON_INLINE FloatVec load(const float* p, N n) { return raw_load<FloatVec>(p, n); }
template <typename N> MEGATRON_INLINE DoubleVec load(const double* p, N n) { return raw_load<DoubleVec>(p, n); }
template <typename N> MEGATRON_INLINE FloatVec load(const bf16* p, N n) {
  return same_bits<FloatVec>(widened(raw_load<HalfBits>(p, n)) << 16);
}
// Without an instruction for it the exponent moves by a multiplication with 2^112, which also normalises fp16's
// subnormal numbers.
template <typename N> MEGATRON_INLINE FloatVec load(const fp16* p, N n) {
#if defined(__AVX512F__)
  return (FloatVec)_mm512_cvtph_ps((__m256i)raw_load<HalfBits>(p, n));
#elif defined(__AVX2__)
  return (FloatVec)_mm256_cvtph_ps((__m128i)raw_load<HalfBits>(p, n));
#else
  Bits half = widened(raw_load<HalfBits>(p, n));
  Bits magnitude = (half & 0x7fff) << 13;
  Bits scaled = same_bits<Bits>(same_bits<FloatVec>(magnitude) * 0x1p112f);
  Bits infinite = magnitude >= 0x0f800000 ? (magnitude | 0x7f800000) : scaled;
  return same_bits<FloatVec>(infinite | ((half & 0x8000) << 16));
#endif
}

template <typename N> MEGATRON_INLINE void store(float* p, FloatVec v, N n) { raw_store(p, v, n); }
template <typename N> MEGATRON_INLINE void store(double* p, DoubleVec v, N n) { raw_store(p, v, n); }
// The lanes in 16 bits, rounded to nearest, ties to even, as everywhere; NaN stays NaN.
MEGATRON_INLINE Bits rounded_halves(FloatVec v) {
  Bits bits = same_bits<Bits>(v);
  Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return v == v ? rounded : Bits{} + 0x7fc0;
}
MEGATRON_INLINE HalfBits halves_of(const bf16*, FloatVec v) { return narrowed(rounded_halves(v)); }
// Below 2^-14 the sum with 0.5 leaves the rounded subnormal number in the lowest bits.
MEGATRON_INLINE HalfBits halves_of(const fp16*, FloatVec v) {
#if defined(__AVX512F__)
  return (HalfBits)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
  return (HalfBits)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#else
  Bits bits = same_bits<Bits>(v), magnitude = bits & 0x7fffffff;
  Bits normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  Bits subnormal = same_bits<Bits>(same_bits<FloatVec>(magnitude) + 0.5f) - 0x3f000000;
  Bits kept = magnitude < 0x38800000 ? subnormal : normal;
  kept = magnitude >= 0x477ff000 ? Bits{} + 0x7c00 : kept;
  kept = magnitude > 0x7f800000 ? Bits{} + 0x7e00 : kept;
  return narrowed(kept | ((bits >> 16) & 0x8000));
#endif
}
template <typename N> MEGATRON_INLINE void store(bf16* p, FloatVec v, N n) { raw_store(p, halves_of(p, v), n); }
template <typename N> MEGATRON_INLINE void store(fp16* p, FloatVec v, N n) { raw_store(p, halves_of(p, v), n); }

// A store past the cache, for which memory is not read first to be overwritten; p is at a multiple of the vector's
// bytes.
#if defined(__AVX512F__)
MEGATRON_INLINE void raw_stream(void* p, FloatVec v) { _mm512_stream_ps(static_cast<float*>(p), (__m512)v); }
MEGATRON_INLINE void raw_stream(void* p, HalfBits v) { _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)v); }
#elif defined(__AVX2__)
MEGATRON_INLINE void raw_stream(void* p, FloatVec v) { _mm256_stream_ps(static_cast<float*>(p), (__m256)v); }
MEGATRON_INLINE void raw_stream(void* p, HalfBits v) { _mm_stream_si128(static_cast<__m128i*>(p), (__m128i)v); }
#else
template <typename V> MEGATRON_INLINE void raw_stream(void* p, V v) { std::memcpy(p, &v, sizeof v); }
#endif
constexpr bool kStreams = kVectorBytes > 16;  // else it is an ordinary store
MEGATRON_INLINE void raw_stream(float* p, FloatVec v, All) { raw_stream(static_cast<void*>(p), v); }
template <typename T> MEGATRON_INLINE void raw_stream(T* p, FloatVec v, All) {
  raw_stream(static_cast<void*>(p), halves_of(p, v));
}

// store(), or where kStream is true a store of whole vectors past the cache; end_streams() comes after the last one.
template <bool kStream, typename T, typename V> MEGATRON_INLINE void put(T* p, V v, Some n) { store(p, v, n); }
template <bool kStream, typename T, typename V> MEGATRON_INLINE void put(T* p, V v, All n) {
  if constexpr (kStream) {
    raw_stream(p, v, n);
  } else {
    store(p, v, n);
  }
}
// put<true>() of the lanes of another row, as they are.
template <typename T> MEGATRON_INLINE void stream_copy(T* to, const T* from, Some n) {
  std::memcpy(to, from, n.n * sizeof(T));
}
template <typename T> MEGATRON_INLINE void stream_copy(T* to, const T* from, All n) {
  raw_stream(static_cast<void*>(to), raw_load<std::conditional_t<sizeof(T) == 2, HalfBits, Vec<T>>>(from, n));
}
MEGATRON_INLINE void end_streams() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// Says that the memory at p + offset will be needed soon and once; what lies behind a tensor is harmless. Passes over a
// row that is in the cache fetch the next one, for which nothing else would be fetched meanwhile.
template <typename T> MEGATRON_INLINE void prefetch(const T* p, int64_t offset) {
  __builtin_prefetch(p + offset, 0, 0);
}

// Calls f(i, All{}) for each whole vector of a row and f(i, Some{n}) for the rest of it.
template <typename T, typename F> MEGATRON_INLINE void for_row(int64_t columns, F f) {
  int64_t i = 0;
  for (; i + kLanes<T> <= columns; i += kLanes<T>) f(i, All{});
  if (i < columns) f(i, Some{static_cast<int>(columns - i)});
}

// The first lanes of v, the others zero: what a sum may count at a row's end.
template <typename V> MEGATRON_INLINE V only(V v, All) { return v; }
template <typename V> MEGATRON_INLINE V only(V v, Some some) {
#if defined(__AVX512F__)
  if constexpr (sizeof v[0] == 4) return (V)_mm512_maskz_mov_epi32((1u << some.n) - 1, (__m512i)v);
#endif
  V kept{};
  std::memcpy(&kept, &v, some.n * sizeof v[0]);
  return kept;
}

// Lane i of the result is lane Order::of(i, lanes) of a and b, one behind the other. Compilers make a shuffle of it.
template <typename Order, typename V, size_t... I> MEGATRON_INLINE V picked(V a, V b, std::index_sequence<I...>) {
  constexpr int kCount = sizeof...(I);
  return V{(Order::of(I, kCount) < kCount ? a[Order::of(I, kCount) % kCount] : b[Order::of(I, kCount) % kCount])...};
}
template <typename Order, typename V> MEGATRON_INLINE V picked(V a, V b) {
  return picked<Order>(a, b, std::make_index_sequence<sizeof(V) / sizeof a[0]>());
}

// The sum of all lanes, by halves: one after another they would take a tenth of the time of a norm's short rows.
template <typename A, int kHalf = kLanes<A> / 2> MEGATRON_INLINE A sum_halves(A* lanes) {
  for (int lane = 0; lane < kHalf; ++lane) lanes[lane] += lanes[lane + kHalf];
  if constexpr (kHalf > 1) return sum_halves<A, kHalf / 2>(lanes);
  return lanes[0];
}
template <typename A> MEGATRON_INLINE A sum_lanes(Vec<A> v) {
  A lanes[kLanes<A>];
  std::memcpy(lanes, &v, sizeof lanes);
  return sum_halves<A>(lanes);
}

template <typename A, int K> struct Sums { A of[K]; };

// Sums over a row in the precision A: f(i, n, sums) adds to the K vectors `sums`. Four sets of them take turns, because
// an addition takes four cycles and two can begin in each.
template <typename T, int K, typename A = Wide<T>, typename F>
MEGATRON_INLINE Sums<A, K> sum_row(int64_t columns, F f) {
  constexpr int kTurns = 4, kStep = kLanes<T>;
  Vec<A> sums[kTurns][K] = {};
  int64_t i = 0;
  for (; i + kTurns * kStep <= columns; i += kTurns * kStep) {
    f(i, All{}, sums[0]);
    f(i + kStep, All{}, sums[1]);
    f(i + 2 * kStep, All{}, sums[2]);
    f(i + 3 * kStep, All{}, sums[3]);
  }
  for (; i + kStep <= columns; i += kStep) f(i, All{}, sums[0]);
  if (i < columns) f(i, Some{static_cast<int>(columns - i)}, sums[1]);
  Sums<A, K> totals{};
  for (int k = 0; k < K; ++k) {
    totals.of[k] = sum_lanes<A>((sums[0][k] + sums[1][k]) + (sums[2][k] + sums[3][k]));
  }
  return totals;
}

// The largest f(i, n) of a row, in four turns as sum_row; -infinity for an empty row, and NaN is passed over. The last
// vector of a row overlaps the one before, which changes no maximum.
template <typename T, typename F> MEGATRON_INLINE Wide<T> max_row(int64_t columns, F f) {
  constexpr int kTurns = 4, kStep = kLanes<T>;
  const Vec<T> lowest = Vec<T>{} - static_cast<Wide<T>>(INFINITY);
  Vec<T> tops[kTurns] = {lowest, lowest, lowest, lowest};
  auto raise = [](Vec<T>& top, Vec<T> v) { top = v > top ? v : top; };
  int64_t i = 0;
  for (; i + kTurns * kStep <= columns; i += kTurns * kStep) {
    for (int turn = 0; turn < kTurns; ++turn) raise(tops[turn], f(i + turn * kStep, All{}));
  }
  if (columns >= kStep) {
    for (; i < columns; i += kStep) raise(tops[0], f(std::min(i, columns - kStep), All{}));
  } else if (columns > 0) {
    Vec<T> all = f(0, Some{static_cast<int>(columns)}), counted = lowest;
    std::memcpy(&counted, &all, columns * sizeof all[0]);
    raise(tops[0], counted);
  }
  for (int turn = 1; turn < kTurns; ++turn) raise(tops[0], tops[turn]);
  Wide<T> top = tops[0][0];
  for (int lane = 1; lane < kStep; ++lane) top = tops[0][lane] > top ? tops[0][lane] : top;
  return top;
}

// Calls f(type()) with the C++ type of a dtype. Float64 is in one of the build's libraries only.
template <typename F> const char* with_dtype(int64_t dtype, F f) {
  switch (dtype) {
    case Float32: f(float{}); return nullptr;
#ifndef MEGATRON_NO_FLOAT64
    case Float64: f(double{}); return nullptr;
#endif
    case BFloat16: f(bf16{}); return nullptr;
    case Float16: f(fp16{}); return nullptr;
  }
  return kWrongDType;
}

}  // namespace megatron
