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

// Row i of a tile in a buffer of floats, or doubles.
template <typename T> void fetch(const T* x, Blocked in, Tile tile, int64_t i, Wide<T>* buffer) {
  const T* from = x + (tile.matrix * in.rows + tile.row + i) * in.columns + tile.column;
  for_row<T>(tile.columns, [=](int64_t j, auto n) { store(buffer + j, load(from + j, n), n); });
}

// Calls found(first row, first column, amax) for each block of a tile; along whole extents, for its part in the tile.
template <typename T, typename F> void find_amaxes(const T* x, Blocked in, Tile tile, F found) {
  using A = Wide<T>;
  using Bits = decltype(magnitude(A()));
  const int64_t height = in.whole_rows ? kTile : in.block_rows, width = in.whole_columns ? kTile : in.block_columns;
  for (int64_t first = 0; first < tile.rows; first += height) {
    A buffer[kTile];
    Bits most[kTile] = {};
    for (int64_t i = first; i < std::min(first + height, tile.rows); ++i) {
      fetch(x, in, tile, i, buffer);
      for (int64_t j = 0; j < tile.columns; ++j) most[j] = std::max(most[j], magnitude(buffer[j]));
    }
    for (int64_t begin = 0; begin < tile.columns; begin += width) {
      Bits largest = 0;
      const int64_t end = std::min(begin + width, tile.columns);
      for (int64_t j = begin; j < end; ++j) largest = std::max(largest, most[j]);
      found(tile.row + first, tile.column + begin, number(largest));
    }
  }
}

// The larger of two amaxes; NaN if one is.
template <typename A> A larger(A a, A b) { return number(std::max(magnitude(a), magnitude(b))); }

// Calls work(tile, part row, part column) for the tiles of each part of each matrix; parts run in parallel.
template <typename F> void for_parts_of(Blocked in, PartGrid grid, int64_t threads, const F& work) {
  const int64_t of_matrix = grid.rows * grid.columns;
  const int64_t down = Blocked::parts(in.rows, kTile), across = Blocked::parts(in.columns, kTile);
  parallel_for(in.matrices * of_matrix, threads, [=, &work](int64_t number) {
    const int64_t part_row = number % of_matrix / grid.columns, part_column = number % grid.columns;
    for (int64_t i = part_row * down / grid.rows; i < (part_row + 1) * down / grid.rows; ++i) {
      for (int64_t j = part_column * across / grid.columns; j < (part_column + 1) * across / grid.columns; ++j) {
        const int64_t row = i * kTile, column = j * kTile;
        work(Tile{number / of_matrix, row, column, std::min(kTile, in.rows - row), std::min(kTile, in.columns - column)},
             part_row, part_column);
      }
    }
  });
}

template <typename T> void find_parts(const T* x, Blocked in, PartGrid grid, Wide<T>* amax, int64_t threads) {
  std::fill(amax, amax + in.amaxes(grid), Wide<T>(0));
  for_parts_of(in, grid, threads, [=](Tile tile, int64_t part_row, int64_t part_column) {
    find_amaxes(x, in, tile, [=](int64_t row, int64_t column, Wide<T> most) {
      Wide<T>& part = amax[in.amax(grid, tile.matrix, row, column, part_row, part_column)];
      part = larger(part, most);
    });
  });
}

// The scales of one memory order of a cast, and where their inverses are written.
struct Scales {
  Blocked in;
  int64_t source;
  const void* amax;
  float *scale, *inverse;
  int64_t inverse_row, inverse_column;

  void set(int64_t matrix, int64_t down, int64_t across, float by) const {
    const int64_t first = matrix * in.blocks_down() * in.blocks_across();
    scale[first + down * in.blocks_across() + across] = by;
    if (inverse) inverse[first + down * inverse_row + across * inverse_column] = 1.0f / by;
  }
  // Computes the scales of all blocks from amaxes in parts.
  template <typename A> void combine(PartGrid grid, double largest, bool power_of_two) const {
    const int64_t down = in.whole_rows ? grid.rows : 1, across = in.whole_columns ? grid.columns : 1;
    for (int64_t matrix = 0; matrix < in.matrices; ++matrix) {
      for (int64_t i = 0; i < in.blocks_down(); ++i) {
        for (int64_t j = 0; j < in.blocks_across(); ++j) {
          A most = 0;
          for (int64_t part = 0; part < down * across; ++part) {
            most = larger(most, static_cast<const A*>(amax)[in.amax(grid, matrix, i * in.block_rows,
                                                                    j * in.block_columns, part / across,
                                                                    part % across)]);
          }
          set(matrix, i, j, scale_of(largest, most, power_of_two));
        }
      }
    }
  }
  // Computes the scales of a tile from its elements.
  template <typename T> void measure(const T* x, Tile tile, double largest, bool power_of_two) const {
    find_amaxes(x, in, tile, [&](int64_t row, int64_t column, Wide<T> most) {
      set(tile.matrix, row / in.block_rows, column / in.block_columns, scale_of(largest, most, power_of_two));
    });
  }
  // The scales of a row of a tile.
  template <typename A> void of_row(Tile tile, int64_t i, A* by) const {
    for (int64_t j = 0; j < tile.columns;) {
      const int64_t end = std::min((tile.column + j) / in.block_columns * in.block_columns + in.block_columns -
                                       tile.column, tile.columns);
      std::fill(by + j, by + end, A(scale[source == kOne ? 0 : in.block(tile.matrix, tile.row + i, tile.column + j)]));
      j = end;
    }
  }
};

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

struct Cast {
  Scales scales, other;
  bool is_shared;
  uint8_t *data, *turned;
  uint32_t* recorded;
};

// Casts a tile; `narrow` is a buffer.
template <typename F, typename T>
void cast_tile(const T* x, const Scales& scales, Tile tile, bool has_nan, uint8_t (*narrow)[kTile]) {
  using A = Wide<T>;
  const Blocked& in = scales.in;
  A buffer[kTile], by[kTile];
  for (int64_t i = 0; i < tile.rows; ++i) {
    if (i == 0 || (tile.row + i) % in.block_rows == 0) scales.of_row(tile, i, by);
    fetch(x, in, tile, i, buffer);
    for_row<A>(tile.columns, [&](int64_t j, auto n) {
      store_narrow<F>(narrow[i] + j, clamped(load(buffer + j, n) * load(by + j, n), A(LargestOf<F>::value)), n);
    });
    for (int64_t j = 0; has_nan && j < tile.columns; ++j) {
      if (!std::isfinite(buffer[j])) narrow[i][j] = 0x7f;
    }
  }
}

template <typename F, typename T> void cast_orders(const T* x, const Cast& cast, Tile tile) {
  const Blocked& in = cast.scales.in;
  uint8_t narrow[kTile][kTile];
  bool has_nan = false;
  if (cast.recorded) {
    Blocked whole = in;
    whole.whole_rows = whole.whole_columns = true;
    Wide<T> most = 0;
    find_amaxes(x, whole, tile, [&](int64_t, int64_t, Wide<T> amax) { most = amax; });
    has_nan = !std::isfinite(most);
    const uint32_t bits = magnitude(float(most));
    uint32_t seen = __atomic_load_n(cast.recorded, __ATOMIC_RELAXED);
    while (bits > seen &&
           !__atomic_compare_exchange_n(cast.recorded, &seen, bits, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
  if (cast.data || cast.is_shared) cast_tile<F>(x, cast.scales, tile, has_nan, narrow);
  for (int64_t i = 0; cast.data && i < tile.rows; ++i) {
    std::memcpy(cast.data + (tile.matrix * in.rows + tile.row + i) * in.columns + tile.column, narrow[i], tile.columns);
  }
  if (!cast.turned) return;
  if (!cast.is_shared) cast_tile<F>(x, cast.other, tile, has_nan, narrow);
  for (int64_t j = 0; j < tile.columns; ++j) {
    uint8_t* to = cast.turned + (tile.matrix * in.columns + tile.column + j) * in.rows + tile.row;
    for (int64_t i = 0; i < tile.rows; ++i) to[i] = narrow[i][j];
  }
}

}  // namespace
}  // namespace megatron

using namespace megatron;

const char* megatron_fp8_amax(int64_t dtype, int64_t matrices, int64_t rows, int64_t columns, const void* x,
                              int64_t row_parts, int64_t column_parts, int64_t block_rows, int64_t block_columns,
                              void* amax, int64_t other_rows, int64_t other_columns, void* other_amax, int64_t threads,
                              void*) {
  const Blocked in = Blocked::of(matrices, rows, columns, block_rows, block_columns);
  const Blocked other = Blocked::of(matrices, rows, columns, other_rows, other_columns);
  const PartGrid grid{row_parts, column_parts};
  if (!in.fits_tiles() || (other_amax && !other.fits_tiles())) return kWrongBlocks;
  if (!in.fits_parts(grid)) return kWrongParts;
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    find_parts(at<T>(x), in, grid, at<Wide<T>>(amax), threads);
    if (other_amax) find_parts(at<T>(x), other, grid, at<Wide<T>>(other_amax), threads);
  });
}

const char* megatron_fp8_cast(int64_t dtype, int64_t matrices, int64_t rows, int64_t columns, const void* x,
                              int64_t format, int64_t power_of_two, int64_t row_parts, int64_t column_parts,
                              int64_t is_shared, void* recorded, int64_t block_rows, int64_t block_columns,
                              int64_t source, const void* amax, void* scale, void* inverse, int64_t inverse_row,
                              int64_t inverse_column, void* data, int64_t other_rows, int64_t other_columns,
                              int64_t other_source, const void* other_amax, void* other_scale, void* other_inverse,
                              int64_t other_inverse_row, int64_t other_inverse_column, void* turned, int64_t threads,
                              void*) {
  const Blocked in = Blocked::of(matrices, rows, columns, block_rows, block_columns);
  const Blocked second = Blocked::of(matrices, rows, columns, other_rows, other_columns);
  if (!has_blocks(in, source) || !has_blocks(second, other_source)) return kWrongBlocks;
  const Scales scales{in, source, amax, at<float>(scale), at<float>(inverse), inverse_row, inverse_column};
  const Scales other{second, other_source, other_amax, at<float>(other_scale), at<float>(other_inverse),
                     other_inverse_row, other_inverse_column};
  const Cast cast{scales, other, is_shared != 0, at<uint8_t>(data), at<uint8_t>(turned), at<uint32_t>(recorded)};
  const bool has_data = cast.data || cast.is_shared, has_other = cast.turned && !cast.is_shared;
  const double largest = format == E5M2 ? LargestOf<NarrowE5M2>::value : LargestOf<NarrowE4M3>::value;
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    const PartGrid grid{row_parts, column_parts};
    if (has_data && scales.source == kParts) scales.template combine<Wide<T>>(grid, largest, power_of_two);
    if (has_other && other.source == kParts) other.template combine<Wide<T>>(grid, largest, power_of_two);
    auto run = [=](auto narrow) {
      using F = decltype(narrow);
      for_tiles(in, threads, [=](Tile tile) {
        if (has_data && scales.source == kOwn) scales.measure(at<T>(x), tile, largest, power_of_two);
        if (has_other && other.source == kOwn) other.measure(at<T>(x), tile, largest, power_of_two);
        cast_orders<F>(at<T>(x), cast, tile);
      });
    };
    format == E5M2 ? run(NarrowE5M2{}) : run(NarrowE4M3{});
  });
}

const char* megatron_fp8_roll(int64_t, int64_t numbers, int64_t steps, int64_t takes_largest, double divisor,
                              double largest0, double largest1, double largest2, void* latest, void* history,
                              void* scale, void* inverse, int64_t, void*) {
  const Roll roll{steps, takes_largest != 0, divisor, {largest0, largest1, largest2}, at<float>(latest),
                  at<float>(history), at<float>(scale), at<float>(inverse)};
  for (int64_t i = 0; i < numbers; ++i) roll.step(i);
  return nullptr;
}
