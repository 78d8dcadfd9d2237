// Casts to 8 bits with a scale per block of a matrix (Micikevicius et al. 2022; megatron_core/features/fp8/casts.py).
//
// x is [matrices, rows, columns]. Blocks have block_rows x block_columns elements, fewer at the end of a matrix. 0
// means the whole extent; other extents are powers of two up to 128, and at most kTileBlocks blocks are in a tile of
// 128 x 128. Scales and amaxes are [matrices, blocks per column, blocks per row].
#pragma once
#include "common/both.h"
#include "common/interface.h"

namespace megatron {
constexpr int64_t kTile = 128, kTileBlocks = 512;
enum Format : int64_t { E4M3 = 0, E5M2 = 1 };
constexpr const char* kWrongBlocks = "blocks must be powers of two up to 128, and 512 of them in 128 x 128 elements";

// The tiles and blocks of a matrix.
struct Blocked {
  int64_t matrices, rows, columns, block_rows, block_columns;

  static Blocked of(int64_t matrices, int64_t rows, int64_t columns, int64_t block_rows, int64_t block_columns) {
    return {matrices, rows, columns, block_rows ? block_rows : rows, block_columns ? block_columns : columns};
  }
  // Whether each tile consists of complete blocks, so that it can compute their amaxes.
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

// amax = the largest |x| of each block, NaN if there is a NaN; float, or double for Float64. Blocks must not have a
// whole extent.
MEGATRON_API const char* megatron_fp8_amax(int64_t dtype, int64_t matrices, int64_t rows, int64_t columns,
                                           int64_t block_rows, int64_t block_columns, const void* x, void* amax,
                                           int64_t threads, void* stream);

// data = cast(clamp(scale x)) to `format`, turned = the same with each matrix transposed; either may be absent. `own`:
// scale is computed as largest(format) / amax, with `power_of_two` rounded down to a power of two, NaN if amax is not
// finite (blocks must not have a whole extent); else it is an input. It is float.
MEGATRON_API const char* megatron_fp8_cast(int64_t dtype, int64_t matrices, int64_t rows, int64_t columns,
                                           int64_t block_rows, int64_t block_columns, const void* x, int64_t format,
                                           int64_t own, int64_t power_of_two, void* scale, void* data, void* turned,
                                           int64_t threads, void* stream);
