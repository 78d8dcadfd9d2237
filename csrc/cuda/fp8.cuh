// Casts to 8 bits: a block of threads processes a tile of 128 x 128 elements. It first computes the scales if required,
// then reads the tile again, from the cache, and transposes it through shared memory.
#pragma once
#include "common/fp8.h"
#include "common/fp8_math.h"
#include "cuda/platform.cuh"

namespace megatron {

constexpr int kTileThreads = 256;
constexpr int kTileStride = int(kTile) + 4;  // padded, so that columns of the transposed tile are in different banks

// The tile of a block of threads, and the packs of N elements of each thread.
template <int N> struct OwnTile {
  static constexpr int kAcross = int(kTile) / N, kStep = kTileThreads / kAcross;
  Blocked in;
  int64_t matrix, row, column;
  int block_rows, block_columns, blocks_across;  // within the tile, at most its size
  int own_column, own_row;

  __device__ explicit OwnTile(Blocked in) : in(in) {
    const int64_t across = Blocked::parts(in.columns, kTile), each = Blocked::parts(in.rows, kTile) * across;
    matrix = blockIdx.x / each;
    row = blockIdx.x % each / across * kTile;
    column = blockIdx.x % across * kTile;
    block_rows = int(in.block_rows < kTile ? in.block_rows : kTile);
    block_columns = int(in.block_columns < kTile ? in.block_columns : kTile);
    blocks_across = int(kTile) / block_columns;
    own_column = int(threadIdx.x) % kAcross * N;
    own_row = int(threadIdx.x) / kAcross;
  }
  __device__ bool has(int i, int j) const { return row + i < in.rows && column + j < in.columns; }
  __device__ int64_t element(int i, int j) const { return (matrix * in.rows + row + i) * in.columns + column + j; }
  __device__ int local_block(int i, int j) const { return i / block_rows * blocks_across + j / block_columns; }
  __device__ int64_t block(int i, int j) const { return in.block(matrix, row + i, column + j); }
};

using TileMaxima = Shared<unsigned, kTileBlocks>;

// The largest |x| of the tile's blocks, as bits; NaN's bits are the largest.
template <typename T, int N> __device__ inline void find_amaxes(const OwnTile<N>& tile, Array<T> x, TileMaxima& most) {
  for (int i = threadIdx.x; i < kTileBlocks; i += kTileThreads) most[i] = 0;
  __syncthreads();
  unsigned found[N] = {};
  for (int i = tile.own_row; i < kTile; i += OwnTile<N>::kStep) {
    if (tile.has(i, tile.own_column)) {
      const Pack<T, N> pack = x.template load<N>(tile.element(i, tile.own_column));
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const unsigned bits = bits_as<unsigned>(to_float(pack.of[k])) & 0x7fffffffu;
        if (bits > found[k]) found[k] = bits;
      }
    }
    const int next = i + OwnTile<N>::kStep;
    if (next < kTile && next / tile.block_rows == i / tile.block_rows) continue;  // uniform in a warp
    if (tile.block_columns < N) {
      for (int k = 0; k < N; ++k) atomicMax(&most[tile.local_block(i, tile.own_column + k)], found[k]);
    } else {
      unsigned all = 0;
      for (int k = 0; k < N; ++k) all = found[k] > all ? found[k] : all;
      int lanes = 1;
      for (; lanes < tile.block_columns / N && lanes < 32; lanes *= 2) {
        const unsigned other = bits_as<unsigned>(__shfl_xor_sync(0xffffffffu, bits_as<float>(all), lanes));
        all = other > all ? other : all;
      }
      if (threadIdx.x % lanes == 0) atomicMax(&most[tile.local_block(i, tile.own_column)], all);
    }
    for (int k = 0; k < N; ++k) found[k] = 0;
  }
  __syncthreads();
}

// Calls f(block of the tile, block of all) for each non-empty block of the tile, distributed over the threads.
template <int N, typename F> __device__ inline void for_blocks(const OwnTile<N>& tile, F f) {
  const int count = int(kTile) / tile.block_rows * tile.blocks_across;
  for (int own = threadIdx.x; own < count; own += kTileThreads) {
    const int i = own / tile.blocks_across * tile.block_rows, j = own % tile.blocks_across * tile.block_columns;
    if (tile.has(i, j)) f(own, tile.block(i, j));
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kTileThreads) fp8_amax_kernel(Blocked in, Array<T> x, Array<float> amax) {
  __shared__ TileMaxima most;
  const OwnTile<N> tile(in);
  find_amaxes(tile, x, most);
  for_blocks(tile, [&](int own, int64_t block) { amax.set(block, bits_as<float>(most[own])); });
}

template <typename F, typename T, int N>
__global__ void __launch_bounds__(kTileThreads)
    fp8_cast_kernel(Blocked in, Array<T> x, bool own_scales, bool power_of_two, Array<float> scale,
                    Array<uint8_t> data, Array<uint8_t> turned) {
  __shared__ TileMaxima most;
  __shared__ Shared<uint8_t, kTile * kTileStride> columns;
  constexpr float kLargest = LargestOf<F>::value;
  const OwnTile<N> tile(in);
  if (own_scales) {
    find_amaxes(tile, x, most);
    for_blocks(tile, [&](int own, int64_t block) {
      const float found = scale_of(kLargest, bits_as<float>(most[own]), power_of_two);
      scale.set(block, found);
      most[own] = bits_as<unsigned>(found);
    });
    __syncthreads();
  }
  for (int i = tile.own_row; i < kTile; i += OwnTile<N>::kStep) {
    if (!tile.has(i, tile.own_column)) continue;
    const int64_t at = tile.element(i, tile.own_column);
    const Pack<T, N> pack = x.template load<N>(at);
    Pack<uint8_t, N> narrow;
    float by = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int j = tile.own_column + k;
      if (k == 0 || tile.block_columns < N) {
        by = own_scales ? bits_as<float>(most[tile.local_block(i, j)]) : scale.get(tile.block(i, j));
      }
      narrow.of[k] = uint8_t(narrow_of<F, uint32_t>(clamped(to_float(pack.of[k]) * by, kLargest)));
      if (turned) columns[j * kTileStride + i] = narrow.of[k];
    }
    if (data) data.template store<N>(at, narrow);
  }
  if (!turned) return;
  __syncthreads();
  constexpr int kPack = 4;
  for (int own = threadIdx.x; own < kTile * kTile / kPack; own += kTileThreads) {
    const int j = own / (int(kTile) / kPack), i = own % (int(kTile) / kPack) * kPack;
    if (!tile.has(i, j)) continue;
    const int64_t at = (tile.matrix * in.columns + tile.column + j) * in.rows + tile.row + i;
    if (in.rows % kPack == 0) {
      Pack<uint8_t, kPack> four;
      for (int k = 0; k < kPack; ++k) four.of[k] = columns[j * kTileStride + i + k];
      turned.template store<kPack>(at, four);
    } else {
      for (int k = 0; k < kPack && tile.has(i + k, j); ++k) turned.set(at + k, columns[j * kTileStride + i + k]);
    }
  }
}

}  // namespace megatron
