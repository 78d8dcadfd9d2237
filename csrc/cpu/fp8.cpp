#include "common/fp8.h"

#include "common/fp8_math.h"
#include "cpu/rows.h"

namespace megatron {
namespace {

// Number of elements of a matrix per task.
struct Tile { int64_t matrix, row, column, rows, columns; };

template <typename F> void for_tiles(Blocked in, int64_t threads, const F& work) {
  const int64_t across = Blocked::parts(in.columns, kTile), each = Blocked::parts(in.rows, kTile) * across;
  parallel_for(in.tiles(), threads, [=, &work](int64_t number) {
    const int64_t row = number % each / across * kTile, column = number % across * kTile;
    work(Tile{number / each, row, column, std::min(kTile, in.rows - row), std::min(kTile, in.columns - column)});
  });
}

// The absolute value as bits, ordered like the numbers; NaN's are the largest.
inline uint32_t magnitude(float v) { return same_bits<uint32_t>(v) & 0x7fffffffu; }
inline uint64_t magnitude(double v) { return same_bits<uint64_t>(v) & 0x7fffffffffffffffu; }
inline float number(uint32_t magnitude) { return same_bits<float>(magnitude); }
inline double number(uint64_t magnitude) { return same_bits<double>(magnitude); }

// Row i of a tile in a buffer of floats, or doubles.
template <typename T> void fetch(const T* x, Blocked in, Tile tile, int64_t i, Wide<T>* buffer) {
  const T* from = x + (tile.matrix * in.rows + tile.row + i) * in.columns + tile.column;
  for_row<T>(tile.columns, [=](int64_t j, auto n) { store(buffer + j, load(from + j, n), n); });
}

// Calls found(block, amax) for each block of a tile.
template <typename T, typename F> void find_amaxes(const T* x, Blocked in, Tile tile, F found) {
  using A = Wide<T>;
  using Bits = decltype(magnitude(A()));
  for (int64_t first = 0; first < tile.rows; first += in.block_rows) {
    A buffer[kTile];
    Bits most[kTile] = {};
    for (int64_t i = first; i < std::min(first + in.block_rows, tile.rows); ++i) {
      fetch(x, in, tile, i, buffer);
      for (int64_t j = 0; j < tile.columns; ++j) most[j] = std::max(most[j], magnitude(buffer[j]));
    }
    for (int64_t begin = 0; begin < tile.columns; begin += in.block_columns) {
      Bits largest = 0;
      const int64_t end = std::min(begin + in.block_columns, tile.columns);
      for (int64_t j = begin; j < end; ++j) largest = std::max(largest, most[j]);
      found(in.block(tile.matrix, tile.row + first, tile.column + begin), number(largest));
    }
  }
}

template <typename F, typename N> MEGATRON_INLINE void store_narrow(uint8_t* p, FloatVec v, N n) {
  const Bits words = narrow_of<F, Bits>(v);
#if defined(__AVX512F__)
  raw_store(p, _mm512_maskz_cvtepi32_epi8(kAllLanes, (__m512i)words), n);
#elif defined(__AVX2__)
  const __m128i halves = (__m128i)narrowed(words);
  raw_store(p, _mm_cvtsi128_si64(_mm_packus_epi16(halves, halves)), n);
#else
  typedef uint8_t Bytes __attribute__((vector_size(kVectorBytes / 4)));
  raw_store(p, __builtin_convertvector(words, Bytes), n);
#endif
}
template <typename F, typename N> MEGATRON_INLINE void store_narrow(uint8_t* p, DoubleVec v, N n) {
  double of[kLanes<double>];
  store(of, v, n);
  int count = kLanes<double>;
  if constexpr (std::is_same_v<N, Some>) count = n.n;
  for (int i = 0; i < count; ++i) p[i] = uint8_t(narrow_of<F, uint32_t>(float(of[i])));
}

template <typename F, typename T>
void cast_tile(const T* x, Blocked in, Tile tile, const float* scale, uint8_t* data, uint8_t* turned) {
  using A = Wide<T>;
  A buffer[kTile], by[kTile];
  uint8_t narrow[kTile][kTile];
  for (int64_t i = 0; i < tile.rows; ++i) {
    if (i == 0 || (tile.row + i) % in.block_rows == 0) {
      const float* next = scale + in.block(tile.matrix, tile.row + i, tile.column);
      for (int64_t j = 0; j < tile.columns; j += in.block_columns) {
        std::fill(by + j, by + std::min(j + in.block_columns, tile.columns), A(*next++));
      }
    }
    fetch(x, in, tile, i, buffer);
    for_row<A>(tile.columns, [&](int64_t j, auto n) {
      store_narrow<F>(narrow[i] + j, clamped(load(buffer + j, n) * load(by + j, n), A(LargestOf<F>::value)), n);
    });
    if (data) {
      std::memcpy(data + (tile.matrix * in.rows + tile.row + i) * in.columns + tile.column, narrow[i], tile.columns);
    }
  }
  for (int64_t j = 0; turned && j < tile.columns; ++j) {
    uint8_t* to = turned + (tile.matrix * in.columns + tile.column + j) * in.rows + tile.row;
    for (int64_t i = 0; i < tile.rows; ++i) to[i] = narrow[i][j];
  }
}

}  // namespace
}  // namespace megatron

using namespace megatron;

const char* megatron_fp8_amax(int64_t dtype, int64_t matrices, int64_t rows, int64_t columns, int64_t block_rows,
                              int64_t block_columns, const void* x, void* amax, int64_t threads, void*) {
  const Blocked in = Blocked::of(matrices, rows, columns, block_rows, block_columns);
  if (!block_rows || !block_columns || !in.has_tiles_of_blocks()) return kWrongBlocks;
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    for_tiles(in, threads, [=](Tile tile) {
      find_amaxes(at<T>(x), in, tile, [=](int64_t block, Wide<T> most) { at<Wide<T>>(amax)[block] = most; });
    });
  });
}

const char* megatron_fp8_cast(int64_t dtype, int64_t matrices, int64_t rows, int64_t columns, int64_t block_rows,
                              int64_t block_columns, const void* x, int64_t format, int64_t own, int64_t power_of_two,
                              void* scale, void* data, void* turned, int64_t threads, void*) {
  const Blocked in = Blocked::of(matrices, rows, columns, block_rows, block_columns);
  if (own && (!block_rows || !block_columns || !in.has_tiles_of_blocks())) return kWrongBlocks;
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    auto run = [=](auto narrow) {
      using F = decltype(narrow);
      for_tiles(in, threads, [=](Tile tile) {
        float* scales = at<float>(scale);
        if (own) {
          find_amaxes(at<T>(x), in, tile, [=](int64_t block, Wide<T> most) {
            scales[block] = scale_of(LargestOf<F>::value, most, power_of_two);
          });
        }
        cast_tile<F>(at<T>(x), in, tile, scales, at<uint8_t>(data), at<uint8_t>(turned));
      });
    };
    format == E5M2 ? run(NarrowE5M2{}) : run(NarrowE4M3{});
  });
}
