// Vectors of the width of the processor's registers, loads and stores with conversion, and sums over a row.
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

// Number of lanes in a load or store: All, or the `n` at a row's end (other lanes are loaded as zero).
struct All {};
struct Some { int n; };

template <typename V, typename T> MEGATRON_INLINE V raw_load(const T* p, All) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <typename V, typename T> MEGATRON_INLINE V raw_load(const T* p, Some some) {
  V v{};
  std::memcpy(&v, p, some.n * sizeof(T));
  return v;
}
template <typename V, typename T> MEGATRON_INLINE void raw_store(T* p, V v, All) { std::memcpy(p, &v, sizeof v); }
template <typename V, typename T> MEGATRON_INLINE void raw_store(T* p, V v, Some some) {
  std::memcpy(p, &v, some.n * sizeof(T));
}

template <typename To, typename From> MEGATRON_INLINE To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// The absolute value as bits, ordered like the numbers; NaN's are the largest.
inline uint32_t magnitude(float v) { return same_bits<uint32_t>(v) & 0x7fffffffu; }
inline uint64_t magnitude(double v) { return same_bits<uint64_t>(v) & 0x7fffffffffffffffu; }
inline float number(uint32_t magnitude) { return same_bits<float>(magnitude); }
inline double number(uint64_t magnitude) { return same_bits<double>(magnitude); }

// 16 bits per lane, zero-extended, and back, for lanes whose upper 16 bits are zero. GCC 12 generates four instructions
// for the first and a table look-up for the second.
#if defined(__AVX512F__)
constexpr __mmask16 kAllLanes = 0xffff;  // of the intrinsics without a mask GCC 12 warns
MEGATRON_INLINE Bits widened(HalfBits v) { return (Bits)_mm512_maskz_cvtepu16_epi32(kAllLanes, (__m256i)v); }
MEGATRON_INLINE HalfBits narrowed(Bits v) { return (HalfBits)_mm512_maskz_cvtepi32_epi16(kAllLanes, (__m512i)v); }
#elif defined(__AVX2__)
MEGATRON_INLINE Bits widened(HalfBits v) { return (Bits)_mm256_cvtepu16_epi32((__m128i)v); }
MEGATRON_INLINE HalfBits narrowed(Bits v) {
  return (HalfBits)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
}
#else
MEGATRON_INLINE Bits widened(HalfBits v) { return __builtin_convertvector(v, Bits); }
MEGATRON_INLINE HalfBits narrowed(Bits v) { return __builtin_convertvector(v, HalfBits); }
#endif

template <typename N> MEGATRON_INLINE FloatVec load(const float* p, N n) { return raw_load<FloatVec>(p, n); }
template <typename N> MEGATRON_INLINE DoubleVec load(const double* p, N n) { return raw_load<DoubleVec>(p, n); }
template <typename N> MEGATRON_INLINE FloatVec load(const bf16* p, N n) {
  return same_bits<FloatVec>(widened(raw_load<HalfBits>(p, n)) << 16);
}
// Multiplication by 2^112 adjusts the exponent and also normalises fp16's subnormal numbers.
template <typename N> MEGATRON_INLINE FloatVec load(const fp16* p, N n) {
  Bits half = widened(raw_load<HalfBits>(p, n));
  Bits magnitude = (half & 0x7fff) << 13;
  Bits scaled = same_bits<Bits>(same_bits<FloatVec>(magnitude) * 0x1p112f);
  Bits infinite = magnitude >= 0x0f800000 ? (magnitude | 0x7f800000) : scaled;
  return same_bits<FloatVec>(infinite | ((half & 0x8000) << 16));
}

template <typename N> MEGATRON_INLINE void store(float* p, FloatVec v, N n) { raw_store(p, v, n); }
template <typename N> MEGATRON_INLINE void store(double* p, DoubleVec v, N n) { raw_store(p, v, n); }
// The lanes in 16 bits, rounded to nearest, ties to even; NaN stays NaN.
MEGATRON_INLINE HalfBits halves_of(const bf16*, FloatVec v) {
  Bits bits = same_bits<Bits>(v);
  Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return narrowed(v == v ? rounded : Bits{} + 0x7fc0);
}
// Below 2^-14 the sum with 0.5 has the rounded subnormal number in its lowest bits.
MEGATRON_INLINE HalfBits halves_of(const fp16*, FloatVec v) {
  Bits bits = same_bits<Bits>(v), magnitude = bits & 0x7fffffff;
  Bits normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  Bits subnormal = same_bits<Bits>(same_bits<FloatVec>(magnitude) + 0.5f) - 0x3f000000;
  Bits kept = magnitude < 0x38800000 ? subnormal : normal;
  kept = magnitude >= 0x477ff000 ? Bits{} + 0x7c00 : kept;
  kept = magnitude > 0x7f800000 ? Bits{} + 0x7e00 : kept;
  return narrowed(kept | ((bits >> 16) & 0x8000));
}
template <typename N> MEGATRON_INLINE void store(bf16* p, FloatVec v, N n) { raw_store(p, halves_of(p, v), n); }
template <typename N> MEGATRON_INLINE void store(fp16* p, FloatVec v, N n) { raw_store(p, halves_of(p, v), n); }

// Calls f(i, All{}) for each complete vector of a row and f(i, Some{n}) for the rest.
template <typename T, typename F> MEGATRON_INLINE void for_row(int64_t columns, F f) {
  int64_t i = 0;
  for (; i + kLanes<T> <= columns; i += kLanes<T>) f(i, All{});
  if (i < columns) f(i, Some{static_cast<int>(columns - i)});
}

// The first lanes of v, the others zero, for sums at a row's end.
template <typename V> MEGATRON_INLINE V only(V v, All) { return v; }
template <typename V> MEGATRON_INLINE V only(V v, Some some) {
  V kept{};
  std::memcpy(&kept, &v, some.n * sizeof v[0]);
  return kept;
}

// Adds v to sums of columns.
template <typename A, typename V, typename N> MEGATRON_INLINE void add_to(A* sums, V v, N n) {
  store(sums, load(sums, n) + v, n);
}

// Lane i of the result is lane Order::of(i, lanes) of the concatenation of a and b. Compilers generate a shuffle.
template <typename Order, typename V, size_t... I> MEGATRON_INLINE V picked(V a, V b, std::index_sequence<I...>) {
  constexpr int kCount = sizeof...(I);
  return V{(Order::of(I, kCount) < kCount ? a[Order::of(I, kCount) % kCount] : b[Order::of(I, kCount) % kCount])...};
}
template <typename Order, typename V> MEGATRON_INLINE V picked(V a, V b) {
  return picked<Order>(a, b, std::make_index_sequence<sizeof(V) / sizeof a[0]>());
}

// Lanes of the lower, or of the upper, halves of two vectors in turn.
struct Lower { static constexpr int of(int i, int count) { return i / 2 + i % 2 * count; } };
struct Upper { static constexpr int of(int i, int count) { return i / 2 + count / 2 + i % 2 * count; } };

// The sum of all lanes, by halves: sequential addition would take a tenth of the time of a norm with short rows.
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

// The maximum of all lanes, by halves.
template <typename A, int kHalf = kLanes<A> / 2> MEGATRON_INLINE A max_halves(A* lanes) {
  for (int lane = 0; lane < kHalf; ++lane) lanes[lane] = std::max(lanes[lane], lanes[lane + kHalf]);
  if constexpr (kHalf > 1) return max_halves<A, kHalf / 2>(lanes);
  return lanes[0];
}

template <typename A, int K> struct Sums { A of[K]; };

// Sums over a row in precision A: f(i, n, sums) adds to the K vectors `sums`. Four sets of them are used in turn,
// because an addition has a latency of four cycles and two can start in each cycle.
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

// The maximum of f(i, n) over a row, with four sets as in sum_row; -infinity for an empty row; NaN is ignored. The last
// vector of a row overlaps the previous one, which does not change a maximum.
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
  Wide<T> lanes[kStep];
  std::memcpy(lanes, &tops[0], sizeof lanes);
  return max_halves<Wide<T>>(lanes);
}

// Calls f(type()) with the C++ type of a dtype. Only one of the built libraries has Float64.
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
