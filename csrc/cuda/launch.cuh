// Launch parameters from the size of a row: packs of 16 bytes if everything is aligned, held in registers if they fit,
// and the number of threads per block.
#pragma once
#include <initializer_list>
#include <type_traits>

#include "cuda/rows.cuh"

namespace megatron {

template <int N> using Int = std::integral_constant<int, N>;

// Whether rows of T can be read in packs: `pointers`, and rows at distances `strides`, are aligned to `bytes`.
template <typename T>
bool in_packs(std::initializer_list<const void*> pointers, std::initializer_list<int64_t> strides, int bytes = 16) {
  uint64_t bits = 0;
  for (const void* pointer : pointers) bits |= reinterpret_cast<uintptr_t>(pointer);
  for (int64_t stride : strides) bits |= static_cast<uint64_t>(stride) * sizeof(T);
  return bits % bytes == 0;
}

// Calls launch(Int<N>, Int<held>, threads) for a row of `columns` and blocks of at most kThreads; held is kHeld or 0.
template <typename T, int kThreads, int kHeld, typename F>
const char* with_row(int64_t columns, bool packed, F launch) {
  constexpr int kPack = 16 / sizeof(T);
  auto whole_warps = [](int64_t wanted) {
    return static_cast<int>(wanted >= kThreads ? kThreads : wanted < 1 ? 32 : (wanted + 31) / 32 * 32);
  };
  if (!packed) return launch(Int<1>{}, Int<0>{}, whole_warps(columns));
  const int64_t packs = columns / kPack;
  if (packs > kThreads * kHeld) return launch(Int<kPack>{}, Int<0>{}, kThreads);
  return launch(Int<kPack>{}, Int<kHeld>{}, whole_warps((packs + kHeld - 1) / kHeld));
}

// Calls launch(T()) for the dtypes supported on GPUs.
template <typename F> const char* with_dtype(int64_t dtype, F launch) {
  switch (dtype) {
    case Float32: return launch(float{});
    case BFloat16: return launch(bf16{});
    case Float16: return launch(fp16{});
  }
  return kWrongDType;
}

// The elements from the beginning of the first row to the end of the last row.
inline int64_t extent(int64_t rows, int64_t stride, int64_t columns) { return (rows - 1) * stride + columns; }

// Launches sum_partials for the sums that start at `first` in each part.
template <typename T>
const char* join_partials(const void* partial, int64_t num_partials, int64_t width, int64_t first, void* total,
                          int64_t columns, void* stream) {
  auto kernel = sum_partials<T>;
  return LAUNCH(kernel, (columns + 31) / 32, 32 * kSumWarps, stream, Array<float>(partial, num_partials * width),
                num_partials, width, first, Array<T>(total, columns), columns);
}

}  // namespace megatron
