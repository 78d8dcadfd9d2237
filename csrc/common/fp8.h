// Casts to 8 bits with a scale per block of a matrix (Micikevicius et al. 2022; megatron_core/features/fp8/casts.py).
//
// x is [matrices, rows, columns]. Blocks have block_rows x block_columns elements, fewer at the end of a matrix. 0
// means the whole extent; other extents are powers of two up to 128, and at most kTileBlocks blocks are in a tile of
// 128 x 128. Scales and amaxes are [matrices, blocks per column, blocks per row].
//
// The largest number of a whole extent is found in parts, each by one block of threads: the tiles of a matrix are
// divided into row_parts x column_parts rectangles, and amaxes have row_parts rows in place of one, and column_parts
// columns. The cast takes the maximum over the parts, so that no launch is needed in between.
#pragma once
#include "common/both.h"
#include "common/interface.h"

namespace megatron {
constexpr int64_t kTile = 128, kTileBlocks = 512;
enum Format : int64_t { E4M3 = 0, E5M2 = 1 };
constexpr const char* kWrongBlocks = "blocks must be powers of two up to 128, and 512 of them in 128 x 128 elements";
constexpr const char* kWrongParts = "a matrix has at least 1 part, and at most as many as tiles in each direction";

// Origin of the scales of a cast: an input for each block, the tile itself (blocks without a whole extent), amaxes in
// parts, or one input for all blocks.
enum ScaleSource : int64_t { kGiven = 0, kOwn = 1, kParts = 2, kOne = 3 };

// Numbers of parts of a matrix.
struct PartGrid { int64_t rows, columns; };

// The tiles and blocks of a matrix.
struct Blocked {
  int64_t matrices, rows, columns, block_rows, block_columns;
  bool whole_rows, whole_columns;

  static Blocked of(int64_t matrices, int64_t rows, int64_t columns, int64_t block_rows, int64_t block_columns) {
    return {matrices, rows, columns, block_rows ? block_rows : rows, block_columns ? block_columns : columns,
            !block_rows, !block_columns};
  }
  // Whether each tile consists of complete blocks, or parts of whole extents.
  bool fits_tiles() const {
    auto fits = [](int64_t n) { return n >= 1 && n <= kTile && (n & (n - 1)) == 0; };
    return (whole_rows || fits(block_rows)) && (whole_columns || fits(block_columns)) &&
           (whole_rows ? 1 : kTile / block_rows) * (whole_columns ? 1 : kTile / block_columns) <= kTileBlocks;
  }
  bool fits_parts(PartGrid grid) const {
    return grid.rows >= 1 && grid.columns >= 1 && grid.rows <= parts(rows, kTile) &&
           grid.columns <= parts(columns, kTile);
  }
  int64_t tiles() const { return matrices * parts(rows, kTile) * parts(columns, kTile); }
  int64_t blocks() const { return matrices * blocks_down() * blocks_across(); }
  int64_t amaxes(PartGrid grid) const { return matrices * parts_down(grid) * parts_across(grid); }

  MEGATRON_BOTH static int64_t parts(int64_t size, int64_t part) { return (size + part - 1) / part; }
  MEGATRON_BOTH int64_t blocks_down() const { return parts(rows, block_rows); }
  MEGATRON_BOTH int64_t blocks_across() const { return parts(columns, block_columns); }
  MEGATRON_BOTH int64_t block(int64_t matrix, int64_t row, int64_t column) const {
    return (matrix * blocks_down() + row / block_rows) * blocks_across() + column / block_columns;
  }
  MEGATRON_BOTH int64_t parts_down(PartGrid grid) const { return whole_rows ? grid.rows : blocks_down(); }
  MEGATRON_BOTH int64_t parts_across(PartGrid grid) const { return whole_columns ? grid.columns : blocks_across(); }
  // The amax of a block in one of the parts; along extents that are not whole, the part is that of the block.
  MEGATRON_BOTH int64_t amax(PartGrid grid, int64_t matrix, int64_t row, int64_t column, int64_t part_row,
                             int64_t part_column) const {
    const int64_t down = whole_rows ? part_row : row / block_rows;
    const int64_t across = whole_columns ? part_column : column / block_columns;
    return (matrix * parts_down(grid) + down) * parts_across(grid) + across;
  }
};

// Whether a cast has kernels for these blocks; a tile does not see whole extents.
inline bool has_blocks(const Blocked& in, int64_t source) {
  return in.fits_tiles() && !(source == kOwn && (in.whole_rows || in.whole_columns));
}
}  // namespace megatron

// amax = the largest |x| of each block, NaN if there is a NaN; float, or double for Float64; `other_amax`, if present,
// is the same for blocks of other_rows x other_columns.
MEGATRON_API const char* megatron_fp8_amax(int64_t dtype, int64_t matrices, int64_t rows, int64_t columns,
                                           const void* x, int64_t row_parts, int64_t column_parts, int64_t block_rows,
                                           int64_t block_columns, void* amax, int64_t other_rows,
                                           int64_t other_columns, void* other_amax, int64_t threads, void* stream);

// data = cast(clamp(scale x)) to `format`, turned = the same with each matrix transposed; either may be absent. Both
// have own blocks and scales, and `turned` those of `data` if `is_shared`. A ScaleSource says whether `scale` is an
// input, or an output computed from `amax` or from x: largest(format) / amax, with `power_of_two` rounded down to a
// power of two, NaN if amax is not finite. `inverse`, if present, is an output with 1 / scale, whose distances between
// blocks along a column and along a row are inverse_row and inverse_column. Scales and inverses are float.
//
// `recorded`, if present, is a float that is raised to the largest |x|; NaN if there is a NaN. Elements that are not
// finite are then NaN, because scales of earlier values do not show them.
MEGATRON_API const char* megatron_fp8_cast(int64_t dtype, int64_t matrices, int64_t rows, int64_t columns,
                                           const void* x, int64_t format, int64_t power_of_two, int64_t row_parts,
                                           int64_t column_parts, int64_t is_shared, void* recorded,
                                           int64_t block_rows, int64_t block_columns, int64_t source, const void* amax,
                                           void* scale, void* inverse, int64_t inverse_row, int64_t inverse_column,
                                           void* data, int64_t other_rows, int64_t other_columns, int64_t other_source,
                                           const void* other_amax, void* other_scale, void* other_inverse,
                                           int64_t other_inverse_row, int64_t other_inverse_column, void* turned,
                                           int64_t threads, void* stream);

// The step of delayed scaling, for `numbers` tensors of which number i has role i % 3: appends latest[i] to history
// [numbers / 3, steps, 3], latest step first, and sets it to 0; an entry that is 0 or not finite repeats the last one.
// scale[i] = largest[role] / amax / divisor, with the latest amax or, with `takes_largest`, the largest of the history;
// 1 if it is 0. inverse = 1 / scale. All are float.
MEGATRON_API const char* megatron_fp8_roll(int64_t dtype, int64_t numbers, int64_t steps, int64_t takes_largest,
                                           double divisor, double largest0, double largest1, double largest2,
                                           void* latest, void* history, void* scale, void* inverse, int64_t threads,
                                           void* stream);
