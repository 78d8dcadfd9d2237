// The products of fixed_products.cpp for one tile of the output, for each kind of registers.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "cpu/vec.h"

// Kernels for wider registers than the library's are selected at run time. Clang and GCC 10 name targets differently.
#if defined(__linux__) && defined(__AVX2__) && !defined(__clang__) && __GNUC__ >= 11
#define MEGATRON_WIDER 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace megatron {
namespace {

// Rounds to bfloat16 and back; NaN stays NaN.
MEGATRON_INLINE float rounded(float v) {
  const uint32_t bits = bits_of(v);
  return v == v ? float_of((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u) : v;
}

// The operations on all elements of a tile.
struct Elements {
  void (*round)(float* values, int64_t count);
  void (*add)(float* total, const float* values, int64_t count);
  void (*add_rounded)(float* total, const float* values, int64_t count);
  void (*add_exact)(const float* values, double* total, int64_t count, double shift, double limit);
};

#define MEGATRON_ELEMENTS(name, target)                                                                    \
  target void name##_round(float* values, int64_t count) {                                                 \
    for (int64_t i = 0; i < count; ++i) values[i] = rounded(values[i]);                                    \
  }                                                                                                        \
  target void name##_add(float* total, const float* values, int64_t count) {                               \
    for (int64_t i = 0; i < count; ++i) total[i] += values[i];                                             \
  }                                                                                                        \
  target void name##_add_rounded(float* total, const float* values, int64_t count) {                       \
    for (int64_t i = 0; i < count; ++i) total[i] = rounded(total[i] + values[i]);                          \
  }                                                                                                        \
  /* Adding the shift rounds, because numbers near it have the unit as distance. */                        \
  target void name##_add_exact(const float* values, double* total, int64_t count, double shift, double limit) { \
    uint32_t largest = 0; /* magnitudes have the order of their bits, and NaN is above all */              \
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, bits_of(values[i]) & 0x7fffffffu);     \
    if (float_of(largest) <= limit) {                                                                      \
      for (int64_t i = 0; i < count; ++i) total[i] += double(values[i]) + shift - shift;                   \
      return;                                                                                              \
    }                                                                                                      \
    for (int64_t i = 0; i < count; ++i) {                                                                  \
      const double x = values[i];                                                                          \
      total[i] += std::abs(x) <= limit ? x + shift - shift : std::numeric_limits<double>::quiet_NaN();     \
    }                                                                                                      \
  }                                                                                                        \
  constexpr Elements name{name##_round, name##_add, name##_add_rounded, name##_add_exact};

// The functions for a tile of rows x columns. Packed panels of a have `rows`, those of b `columns` elements for each
// inner index; lengths are filled with zeros to multiples of `multiple`.
struct Kernel {
  const char* name;
  int64_t rows, columns, multiple;
  void (*product)(const void* a, const void* b, int64_t length, float* sums);
  const Elements& elements;
  bool uses_amx;

  int64_t padded(int64_t length) const { return (length + multiple - 1) / multiple * multiple; }
};
constexpr int64_t kMostTile = 32 * 32;
constexpr int kMostStack = 16;

// The sums of a tile are in registers. GCC joins the product and the addition to one fused instruction if
// the target has it. A macro, because vectors wider than the file's need the target at the loop itself.
#define MEGATRON_FLOAT_TILE(name, target, Vector, kRows)                                          \
  target void name(const void* packed_a, const void* packed_b, int64_t length, float* sums) {      \
    constexpr int kWidth = sizeof(Vector) / sizeof(float);                                          \
    const float *a = static_cast<const float*>(packed_a), *b = static_cast<const float*>(packed_b); \
    Vector left[kRows] = {}, right[kRows] = {};                                                     \
    for (int64_t k = 0; k < length; ++k, a += kRows, b += 2 * kWidth) {                             \
      Vector b0, b1;                                                                                \
      std::memcpy(&b0, b, sizeof b0);                                                               \
      std::memcpy(&b1, b + kWidth, sizeof b1);                                                      \
      _Pragma("GCC unroll 16") for (int row = 0; row < kRows; ++row) {                              \
        left[row] += a[row] * b0;                                                                   \
        right[row] += a[row] * b1;                                                                  \
      }                                                                                             \
    }                                                                                               \
    _Pragma("GCC unroll 16") for (int row = 0; row < kRows; ++row, sums += 2 * kWidth) {            \
      std::memcpy(sums, &left[row], sizeof(Vector));                                                \
      std::memcpy(sums + kWidth, &right[row], sizeof(Vector));                                      \
    }                                                                                               \
  }

constexpr int kBaseRows = 6;
MEGATRON_FLOAT_TILE(base_tile, , FloatVec, kBaseRows)
MEGATRON_ELEMENTS(base_elements, )
constexpr Kernel kBase{"vectors", kBaseRows, 2 * kFloats, 1, base_tile, base_elements, false};

// The last of kBase, kAvx512 and kAmx that may be chosen; only tests change it.
std::atomic<int64_t> most_kernel{2};

#ifdef MEGATRON_WIDER
#define MEGATRON_AVX512 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512")))
typedef float WideVec __attribute__((vector_size(64)));
MEGATRON_FLOAT_TILE(avx512_tile, MEGATRON_AVX512, WideVec, 14)
MEGATRON_ELEMENTS(avx512_elements, MEGATRON_AVX512)
constexpr Kernel kAvx512{"avx512", 14, 32, 1, avx512_tile, avx512_elements, false};

// 32 x 32 sums in four tile registers; for each 32 inner indices a panel has two tiles of 1 kB.
#define MEGATRON_AMX __attribute__((target("amx-tile,amx-bf16")))
MEGATRON_AMX void amx_tile(const void* packed_a, const void* packed_b, int64_t length, float* sums) {
  const char *a = static_cast<const char*>(packed_a), *b = static_cast<const char*>(packed_b);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < length; k += 32, a += 2048, b += 2048) {
    _tile_loadd(4, a, 64);
    _tile_loadd(5, a + 1024, 64);
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b + 1024, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  _tile_stored(2, sums + 16 * 32, 128);
  _tile_stored(3, sums + 16 * 32 + 16, 128);
}
constexpr Kernel kAmx{"amx", 32, 32, 32, amx_tile, avx512_elements, true};

// Configures the tile registers in the scope of a task, and restores the library's that used them before.
struct alignas(64) TileConfig {
  uint8_t bytes[64] = {};
};
// GCC 12's _tile_loadconfig tells the compiler of eight of the bytes only.
void save_tiles(TileConfig* config) { asm volatile("sttilecfg %0" : "=m"(*config)); }
void load_tiles(const TileConfig* config) {
  if (config->bytes[0]) {
    asm volatile("ldtilecfg %0" ::"m"(*config));
  } else {
    asm volatile("tilerelease");
  }
}
class AmxScope {
 public:
  explicit AmxScope(bool used) : used_(used) {
    if (!used) return;
    save_tiles(&before_);
    TileConfig own;
    own.bytes[0] = 1;  // the palette
    for (int tile = 0; tile < 8; ++tile) {
      own.bytes[16 + 2 * tile] = 64;  // bytes of a row
      own.bytes[48 + tile] = 16;      // rows
    }
    load_tiles(&own);
  }
  ~AmxScope() {
    if (used_) load_tiles(&before_);
  }
  AmxScope(const AmxScope&) = delete;
  AmxScope& operator=(const AmxScope&) = delete;

 private:
  bool used_;
  TileConfig before_;
};

// Whether the kernel lets this process use tile registers (arch_prctl ARCH_REQ_XCOMP_PERM for their data).
bool has_amx() {
  static const bool found = __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("amx-bf16") &&
                            syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return found;
}
// The best kernel of this process, or the last that tests allow.
const Kernel& kernel_of(bool bfloat16) {
  static const bool wide = __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512vl");
  if (bfloat16 && most_kernel >= 2 && has_amx()) return kAmx;
  return wide && most_kernel >= 1 ? kAvx512 : kBase;
}
#else
struct AmxScope {
  explicit AmxScope(bool) {}
};
const Kernel& kernel_of(bool) { return kBase; }
#endif

}  // namespace
}  // namespace megatron
