// Common parts of rowwise kernels: a row distributed over a block's threads, sums over the block, sums over rows.
#pragma once
#include "common/fp8_math.h"
#include "common/interface.h"
#include "cuda/platform.cuh"

namespace megatron {

// Calls f(slot, column) for each pack of N columns of this thread. Up to kHeld packs are held in registers, and slot is
// a constant then; with kHeld = 0 packs are loaded again in each pass.
template <int kHeld, int N, typename F> __device__ inline void for_packs(int64_t columns, F f) {
  if constexpr (kHeld > 0) {
#pragma unroll
    for (int slot = 0; slot < kHeld; ++slot) {
      const int64_t column = (int64_t(slot) * blockDim.x + threadIdx.x) * N;
      if (column < columns) f(slot, column);
    }
  } else {
    for (int64_t column = int64_t(threadIdx.x) * N; column < columns; column += int64_t(blockDim.x) * N) f(0, column);
  }
}

// This thread's part of a row of T: fetch() reads the held packs; load() then returns one pack after another.
template <typename T, int N, int kHeld> struct Row {
  Array<T> tensor;
  int64_t begin;
  Pack<T, N> held[kHeld > 0 ? kHeld : 1];

  __device__ Row(Array<T> tensor, int64_t begin) : tensor(tensor), begin(begin) {}

  __device__ void fetch(int64_t columns) {
    if constexpr (kHeld > 0) {
      for_packs<kHeld, N>(columns, [&](int slot, int64_t i) { held[slot] = tensor.template load<N>(begin + i); });
    }
  }
  __device__ Pack<T, N> load(int slot, int64_t i) const {
    if constexpr (kHeld > 0) return held[slot];
    return tensor.template load<N>(begin + i);
  }
};

// N floats in packs of 16 bytes, or fewer if N is 1: single floats would each be a transaction of 32 bytes.
template <int N> __device__ inline Pack<float, N> load_floats(Array<float> from, int64_t begin) {
  constexpr int kFew = N < 4 ? N : 4;
  Pack<float, N> v;
#pragma unroll
  for (int k = 0; k < N; k += kFew) {
    const Pack<float, kFew> few = from.template load<kFew>(begin + k);
    for (int j = 0; j < kFew; ++j) v.of[k + j] = few.of[j];
  }
  return v;
}
template <int N> __device__ inline void store_floats(Array<float> to, int64_t begin, Pack<float, N> v) {
  constexpr int kFew = N < 4 ? N : 4;
#pragma unroll
  for (int k = 0; k < N; k += kFew) {
    Pack<float, kFew> few;
    for (int j = 0; j < kFew; ++j) few.of[j] = v.of[k + j];
    to.template store<kFew>(begin + k, few);
  }
}

// A block's sums for this thread's columns, in registers if packs are held, else in `partial`.
template <int N, int kHeld> struct ColumnSums {
  Array<float> partial;
  int64_t begin;
  Pack<float, N> held[kHeld > 0 ? kHeld : 1];

  __device__ ColumnSums(Array<float> partial, int64_t begin) : partial(partial), begin(begin) {}
  __device__ void clear(int64_t columns) {
    for_packs<kHeld, N>(columns, [&](int slot, int64_t i) { put(slot, i, Pack<float, N>{}); });
  }
  __device__ void add(int slot, int64_t i, Pack<float, N> v) {
    Pack<float, N> sum = kHeld > 0 ? held[slot] : get(i);
    for (int k = 0; k < N; ++k) sum.of[k] += v.of[k];
    put(slot, i, sum);
  }
  __device__ void write(int64_t columns) {
    if constexpr (kHeld > 0) for_packs<kHeld, N>(columns, [&](int slot, int64_t i) { set(i, held[slot]); });
  }

 private:
  __device__ void put(int slot, int64_t i, Pack<float, N> v) {
    if (kHeld > 0) held[slot] = v; else set(i, v);
  }
  __device__ Pack<float, N> get(int64_t i) const { return load_floats<N>(partial, begin + i); }
  __device__ void set(int64_t i, Pack<float, N> v) const { store_floats<N>(partial, begin + i, v); }
};

// The sums of two numbers over all threads of a block, in every thread; `scratch` can be reused afterwards.
struct Two { float a, b; };
using Scratch = Shared<Two, 32>;

__device__ inline Two warp_sum(Two v) {
  for (int lane = 16; lane > 0; lane /= 2) {
    v.a += __shfl_xor_sync(0xffffffffu, v.a, lane);
    v.b += __shfl_xor_sync(0xffffffffu, v.b, lane);
  }
  return v;
}

// The largest of a warp's numbers.
__device__ inline unsigned largest_of_warp(unsigned largest) {
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const unsigned other = bits_as<unsigned>(__shfl_xor_sync(0xffffffffu, bits_as<float>(largest), lanes));
    largest = other > largest ? other : largest;
  }
  return largest;
}

// Combines a block's numbers as join_warp combines a warp's; `nothing` is the neutral element.
template <typename F> __device__ inline Two join_block(Two v, Two nothing, Scratch& scratch, F join_warp) {
  v = join_warp(v);
  if (blockDim.x <= 32) return v;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  v = threadIdx.x % 32 < blockDim.x / 32 ? scratch[threadIdx.x % 32] : nothing;
  __syncthreads();
  return join_warp(v);
}

__device__ inline Two block_sum(Two v, Scratch& scratch) {
  return join_block(v, Two{0, 0}, scratch, [](Two numbers) { return warp_sum(numbers); });
}

// total[i] = sum over parts of partial[part * width + i]. A block has 32 columns, and each of its warps every
// kSumWarps-th part of them: a single thread per column would wait for hundreds of sequential loads.
constexpr int kSumWarps = 16;
template <typename T>
__global__ void __launch_bounds__(kSumWarps * 32)
    sum_partials(Array<float> partial, int64_t num_partials, int64_t width, int64_t first, Array<T> total,
                 int64_t columns) {
  __shared__ Shared<float, kSumWarps * 32> scratch;
  const int64_t column = int64_t(blockIdx.x) * 32 + threadIdx.x % 32;
  float sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (int64_t part = threadIdx.x / 32; part < num_partials; part += kSumWarps) {
      sum += partial.get(part * width + first + column);
    }
  }
  scratch[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= 32 || column >= columns) return;
  for (int warp = 1; warp < kSumWarps; ++warp) sum += scratch[warp * 32 + threadIdx.x];
  total.set(column, from_float<T>(sum));
}

}  // namespace megatron
