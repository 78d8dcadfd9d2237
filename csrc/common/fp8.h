// Casts to 8 bits with a scale for each block of a matrix (Micikevicius et al. 2022; megatron_core/ops/fp8.py).
//
// x is [matrices, rows, columns]. Blocks have block_rows x block_columns elements, the last ones of a matrix fewer; 0
// stands for the whole extent, else an extent is a power of two up to 128, and at most kTileBlocks of them lie in a
// tile of 128 x 128. Scales and amaxes are [matrices, blocks in a column, blocks in a row].
#pragma once
#include "common/both.h"
#include "common/interface.h"

namespace megatron {
constexpr int64_t kTile = 128, kTileBlocks = 512;
enum Format : int64_t { E4M3 = 0, E5M2 = 1 };
constexpr const char* kWrongBlocks = "blocks must be powers of two up to 128, and 512 of them in 128 x 128 elements";

// A matrix in tiles and blocks.
struct Blocked {
  int64_t matrices, rows, columns, block_rows, block_columns;

  static Blocked of(int64_t matrices, int64_t rows, int64_t columns, int64_t block_rows, int64_t block_columns) {
    return {matrices, rows, columns, block_rows ? block_rows : rows, block_columns ? block_columns : columns};
  }
  // Whether each tile consists of whole blocks, so that it can find their amaxes.
  bool has_tiles_of_blocks() const {
    auto fits = [](int64_t n) { return n >= 1 && n <= kTile && (n & (n - 1)) == 0; };
    return fits(block_rows) && fits(block_columns) &&
           (kTile / block_rows) * (kTile / block_columns) <= kTileBlocks;
  }
  int64_t tiles() const { return matrices * parts(rows, kTile) * parts(columns, kTile); }

  MEGATRON_BOTH static int64_t parts(int64_t size, int64_t part) { return (size + part - 1) / part; }
  MEGATRON_BOTH int64_t block(int64_t matrix, int64_t row, int64_t column) const {
    return (matrix * parts(rows, block_rows) + row / block_rows) * parts(columns, block_columns) +
           column / block_columns;
  }
};
}  // namespace megatron

// amax = the largest |x| of each block, NaN where there is one; float, or double for Float64. No block is whole.
MEGATRON_API const char* megatron_fp8_amax(int64_t dtype, int64_t matrices, int64_t rows, int64_t columns,
                                           int64_t block_rows, int64_t block_columns, const void* x, void* amax,
                                           int64_t threads, void* stream);

// data = cast(clamp(scale x)) to `format`, turned = the same with each matrix transposed; either may be absent. `own`:
// scale is computed, as largest(format) / amax, with `power_of_two` rounded down to one, and NaN where amax is not
// finite, and no block is whole; else it is given. It is float.
MEGATRON_API const char* megatron_fp8_cast(int64_t dtype, int64_t matrices, int64_t rows, int64_t columns,
                                           int64_t block_rows, int64_t block_columns, const void* x, int64_t format,
                                           int64_t own, int64_t power_of_two, void* scale, void* data, void* turned,
                                           int64_t threads, void* stream);
