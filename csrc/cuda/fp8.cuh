// Casts to 8 bits: a block of threads processes a tile of 128 x 128 elements. It first computes the scales if required,
// then reads the tile again, from the cache, and transposes it through shared memory.
#pragma once
#include "common/fp8.h"
#include "common/fp8_math.h"
#include "cuda/rows.cuh"

namespace megatron {

constexpr int kTileThreads = 256;
constexpr int kTileStride = int(kTile) + 4;  // padded, so that columns of the transposed tile are in different banks

// A tile, and the packs of N elements of each thread.
template <int N> struct Tile {
  static constexpr int kAcross = int(kTile) / N, kStep = kTileThreads / kAcross;
  Blocked in;
  int64_t matrix, row, column;
  int block_rows, block_columns, blocks_across;  // within the tile, at most its size
  int own_column, own_row;

  __device__ Tile(Blocked in, int64_t matrix, int64_t tile_row, int64_t tile_column)
      : in(in), matrix(matrix), row(tile_row * kTile), column(tile_column * kTile) {
    block_rows = int(in.whole_rows || in.block_rows > kTile ? kTile : in.block_rows);
    block_columns = int(in.whole_columns || in.block_columns > kTile ? kTile : in.block_columns);
    blocks_across = int(kTile) / block_columns;
    own_column = int(threadIdx.x) % kAcross * N;
    own_row = int(threadIdx.x) / kAcross;
  }
  // The tile of a block of threads, if each has one.
  __device__ static Tile own(Blocked in) {
    const int64_t across = Blocked::parts(in.columns, kTile), of_matrix = Blocked::parts(in.rows, kTile) * across;
    return Tile(in, blockIdx.x / of_matrix, blockIdx.x % of_matrix / across, blockIdx.x % across);
  }
  __device__ bool has(int i, int j) const { return row + i < in.rows && column + j < in.columns; }
  __device__ int64_t element(int i, int j) const { return (matrix * in.rows + row + i) * in.columns + column + j; }
  __device__ int local_block(int i, int j) const { return i / block_rows * blocks_across + j / block_columns; }
  __device__ int blocks() const { return int(kTile) / block_rows * blocks_across; }
  // Calls f(block of the tile, row, column) for each non-empty block of the tile, distributed over the threads.
  template <typename F> __device__ void for_blocks(F f) const {
    for (int local = threadIdx.x; local < blocks(); local += kTileThreads) {
      const int i = local / blocks_across * block_rows, j = local % blocks_across * block_columns;
      if (has(i, j)) f(local, row + i, column + j);
    }
  }
};

using TileMaxima = Shared<unsigned, kTileBlocks>;

__device__ inline void clear(TileMaxima& most) {
  __syncthreads();
  for (int i = threadIdx.x; i < kTileBlocks; i += kTileThreads) most[i] = 0;
  __syncthreads();
}

// Raises the maxima of the tile's blocks to the largest |x|, as bits; NaN's bits are the largest.
template <typename T, int N> __device__ inline void add_amaxes(const Tile<N>& tile, Array<T> x, TileMaxima& most) {
  unsigned largest[N] = {};
  for (int i = tile.own_row; i < kTile; i += Tile<N>::kStep) {
    if (tile.has(i, tile.own_column)) {
      const Pack<T, N> pack = x.template load<N>(tile.element(i, tile.own_column));
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const unsigned bits = bits_as<unsigned>(to_float(pack.of[k])) & 0x7fffffffu;
        if (bits > largest[k]) largest[k] = bits;
      }
    }
    const int next = i + Tile<N>::kStep;
    if (next < kTile && next / tile.block_rows == i / tile.block_rows) continue;  // uniform in a warp
    if (tile.block_columns < N) {
      for (int k = 0; k < N; ++k) atomicMax(&most[tile.local_block(i, tile.own_column + k)], largest[k]);
    } else {
      unsigned all = 0;
      for (int k = 0; k < N; ++k) all = largest[k] > all ? largest[k] : all;
      int lanes = 1;
      for (; lanes < tile.block_columns / N && lanes < 32; lanes *= 2) {
        const unsigned other = bits_as<unsigned>(__shfl_xor_sync(0xffffffffu, bits_as<float>(all), lanes));
        all = other > all ? other : all;
      }
      if (threadIdx.x % lanes == 0) atomicMax(&most[tile.local_block(i, tile.own_column)], all);
    }
    for (int k = 0; k < N; ++k) largest[k] = 0;
  }
  __syncthreads();
}

// The amaxes of the blocks in this block's part of a matrix. Tiles that share blocks follow each other.
template <typename T, int N>
__device__ inline void find_part(Blocked in, PartGrid grid, Array<T> x, Array<float> amax, TileMaxima& most) {
  const int64_t of_matrix = grid.rows * grid.columns, matrix = blockIdx.x / of_matrix;
  const int64_t part_row = blockIdx.x % of_matrix / grid.columns, part_column = blockIdx.x % grid.columns;
  const int64_t down = Blocked::parts(in.rows, kTile), across = Blocked::parts(in.columns, kTile);
  const int64_t row = part_row * down / grid.rows, height = (part_row + 1) * down / grid.rows - row;
  const int64_t column = part_column * across / grid.columns;
  const int64_t width = (part_column + 1) * across / grid.columns - column;
  const bool by_column = in.whole_rows && !in.whole_columns;
  const bool whole_inner = by_column || in.whole_columns, whole_outer = in.whole_rows && in.whole_columns;
  const int64_t inner = by_column ? height : width, outer = by_column ? width : height;
  clear(most);
  for (int64_t i = 0; i < outer; ++i) {
    for (int64_t j = 0; j < inner; ++j) {
      const Tile<N> tile(in, matrix, row + (by_column ? j : i), column + (by_column ? i : j));
      add_amaxes(tile, x, most);
      if (whole_inner && (j + 1 < inner || (whole_outer && i + 1 < outer))) continue;
      tile.for_blocks([&](int local, int64_t at_row, int64_t at_column) {
        amax.set(in.amax(grid, matrix, at_row, at_column, part_row, part_column), bits_as<float>(most[local]));
      });
      clear(most);
    }
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kTileThreads)
    fp8_amax_kernel(Blocked in, Blocked other, PartGrid grid, Array<T> x, Array<float> amax, Array<float> other_amax) {
  __shared__ TileMaxima most;
  find_part<T, N>(in, grid, x, amax, most);
  if (other_amax) find_part<T, N>(other, grid, x, other_amax, most);
}

// The scales of one memory order of a cast, and where their inverses are written.
struct Scales {
  int64_t source;
  Array<float> amax, scale, inverse;
  int64_t inverse_row, inverse_column;

  __device__ void set(const Blocked& in, int64_t matrix, int64_t row, int64_t column, float by) const {
    scale.set(in.block(matrix, row, column), by);
    if (!inverse) return;
    const int64_t down = row / in.block_rows, across = column / in.block_columns;
    inverse.set(matrix * in.blocks_down() * in.blocks_across() + down * inverse_row + across * inverse_column,
                1.0f / by);
  }
};

// Writes the scales of the tile's blocks to `most`, as bits, and to memory if they are computed.
template <typename T, int N>
__device__ inline void find_scales(const Tile<N>& tile, const Scales& scales, PartGrid grid, Array<T> x,
                                   double largest, bool power_of_two, TileMaxima& most) {
  const Blocked& in = tile.in;
  if (scales.source == kGiven || scales.source == kOne) {
    tile.for_blocks([&](int local, int64_t row, int64_t column) {
      const int64_t block = scales.source == kOne ? 0 : in.block(tile.matrix, row, column);
      most[local] = bits_as<unsigned>(scales.scale.get(block));
    });
    __syncthreads();
    return;
  }
  clear(most);
  if (scales.source == kOwn) {
    add_amaxes(tile, x, most);
  } else {
    const int64_t down = in.whole_rows ? grid.rows : 1, across = in.whole_columns ? grid.columns : 1;
    const int64_t parts = down * across;
    for (int64_t k = threadIdx.x; k < parts * tile.blocks(); k += kTileThreads) {
      // Neighbouring threads read neighbouring numbers.
      const int local = int(in.whole_rows ? k % tile.blocks() : k / parts);
      const int64_t part = in.whole_rows ? k / tile.blocks() : k % parts;
      const int i = local / tile.blocks_across * tile.block_rows, j = local % tile.blocks_across * tile.block_columns;
      if (!tile.has(i, j)) continue;
      const float amax = scales.amax.get(
          in.amax(grid, tile.matrix, tile.row + i, tile.column + j, part / across, part % across));
      atomicMax(&most[local], bits_as<unsigned>(amax) & 0x7fffffffu);
    }
    __syncthreads();
  }
  // One of the tiles of a block writes its scale.
  const bool writes = (!in.whole_rows || tile.row == 0) && (!in.whole_columns || tile.column == 0);
  tile.for_blocks([&](int local, int64_t row, int64_t column) {
    const float by = scale_of(largest, bits_as<float>(most[local]), power_of_two);
    if (writes) scales.set(in, tile.matrix, row, column, by);
    most[local] = bits_as<unsigned>(by);
  });
  __syncthreads();
}

// The largest of all threads' numbers, to a number in memory that other blocks raise, too.
__device__ inline void raise(Array<unsigned> total, unsigned largest, TileMaxima& scratch) {
  largest = largest_of_warp(largest);
  clear(scratch);
  if (threadIdx.x % 32 == 0) atomicMax(&scratch[0], largest);
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(total.p, scratch[0]);
}

// Casts of one kernel: `turned` has blocks and scales of its own, or those of `data` if they are shared.
struct Cast {
  Blocked in, other;
  Scales scales, other_scales;
  PartGrid grid;
  bool is_shared, power_of_two;
  Array<uint8_t> data, turned;
  Array<unsigned> recorded;
};

template <typename F, typename T, int N>
__global__ void __launch_bounds__(kTileThreads) fp8_cast_kernel(Cast cast, Array<T> x) {
  __shared__ TileMaxima most, other_most;
  __shared__ Shared<uint8_t, kTile * kTileStride> columns;
  constexpr float kLargest = LargestOf<F>::value;
  const Tile<N> tile = Tile<N>::own(cast.in), other = Tile<N>::own(cast.other);
  const bool has_data = cast.data || cast.is_shared, has_other = cast.turned && !cast.is_shared;
  if (has_data) find_scales(tile, cast.scales, cast.grid, x, kLargest, cast.power_of_two, most);
  if (has_other) find_scales(other, cast.other_scales, cast.grid, x, kLargest, cast.power_of_two, other_most);
  unsigned largest = 0;
  for (int i = tile.own_row; i < kTile; i += Tile<N>::kStep) {
    if (!tile.has(i, tile.own_column)) continue;
    const int64_t at = tile.element(i, tile.own_column);
    const Pack<T, N> pack = x.template load<N>(at);
    Pack<uint8_t, N> narrow{};
    float by = 0, other_by = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int j = tile.own_column + k;
      const float v = to_float(pack.of[k]);
      unsigned bits = 0;
      if (cast.recorded) {
        bits = bits_as<unsigned>(v) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
      }
      const uint8_t nan = 0x7f;
      if (has_data) {
        if (k == 0 || tile.block_columns < N) by = bits_as<float>(most[tile.local_block(i, j)]);
        narrow.of[k] = uint8_t(narrow_of<F, uint32_t>(clamped(v * by, kLargest)));
        if (bits >= 0x7f800000u) narrow.of[k] = nan;
      }
      if (has_other) {
        if (k == 0 || other.block_columns < N) other_by = bits_as<float>(other_most[other.local_block(i, j)]);
        const uint8_t n = uint8_t(narrow_of<F, uint32_t>(clamped(v * other_by, kLargest)));
        columns[j * kTileStride + i] = bits >= 0x7f800000u ? nan : n;
      } else if (cast.turned) {
        columns[j * kTileStride + i] = narrow.of[k];
      }
    }
    if (cast.data) cast.data.template store<N>(at, narrow);
  }
  if (cast.recorded) raise(cast.recorded, largest, most);
  if (!cast.turned) return;
  __syncthreads();
  constexpr int kPack = 4;
  const Blocked& in = cast.in;
  for (int own = threadIdx.x; own < kTile * kTile / kPack; own += kTileThreads) {
    const int j = own / (int(kTile) / kPack), i = own % (int(kTile) / kPack) * kPack;
    if (!tile.has(i, j)) continue;
    const int64_t at = (tile.matrix * in.columns + tile.column + j) * in.rows + tile.row + i;
    if (in.rows % kPack == 0) {
      Pack<uint8_t, kPack> four;
      for (int k = 0; k < kPack; ++k) four.of[k] = columns[j * kTileStride + i + k];
      cast.turned.template store<kPack>(at, four);
    } else {
      for (int k = 0; k < kPack && tile.has(i + k, j); ++k) cast.turned.set(at + k, columns[j * kTileStride + i + k]);
    }
  }
}

__global__ void __launch_bounds__(kTileThreads) fp8_roll_kernel(Roll roll, int64_t numbers) {
  const int64_t i = int64_t(blockIdx.x) * kTileThreads + threadIdx.x;
  if (i < numbers) roll.step(i);
}

}  // namespace megatron
