// Lists of tensors: a table is passed to a kernel by value, and each block processes one chunk of one tensor, one pack
// of elements per thread at a time.
#pragma once
#include "common/interface.h"
#include "cuda/rows.cuh"

namespace megatron {

// A launch takes at most 4 KB of arguments; a table of five pointers has 3.6 KB.
constexpr int kTableTensors = 64, kTableThreads = 512;

template <int kPointers> struct Table {
  int64_t first_chunk[kTableTensors + 1];  // of each tensor, followed by the total number of chunks
  int64_t size[kTableTensors];
  void* pointers[kTableTensors][kPointers];
};

// This block's elements: begin ... end - 1 of one of the table's tensors.
struct Part {
  int tensor;
  int64_t begin, end;
};

template <int kPointers> __device__ inline Part own_part(const Table<kPointers>& table, int64_t chunk) {
  int tensor = 0;
  while (int64_t(blockIdx.x) >= table.first_chunk[tensor + 1]) ++tensor;
  const int64_t begin = (blockIdx.x - table.first_chunk[tensor]) * chunk, size = table.size[tensor];
  return {tensor, begin, begin + chunk < size ? begin + chunk : size};
}

// Calls f(i) for the first of each N elements of this thread; kTogether loads are in flight.
template <int N, int kTogether, typename F> __device__ inline void for_each(Part part, F f) {
#pragma unroll kTogether
  for (int64_t i = part.begin + N * threadIdx.x; i < part.end; i += N * blockDim.x) f(i);
}

// A tensor in packs: in one access if it is aligned, else element by element; elements beyond its end are zero.
template <typename T, int N> struct Packs {
  Array<T> tensor;
  int64_t size;
  bool packed;

  __device__ Packs(void* pointer, int64_t size)
      : tensor(pointer, size), size(size), packed(reinterpret_cast<uintptr_t>(pointer) % sizeof(Pack<T, N>) == 0) {}
  __device__ Pack<T, N> load(int64_t i) const {
    if (packed && i + N <= size) return tensor.template load<N>(i);
    Pack<T, N> pack{};
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (i + k < size) pack.of[k] = tensor.get(i + k);
    return pack;
  }
  __device__ void store(int64_t i, Pack<T, N> pack) const {
    if (packed && i + N <= size) return tensor.template store<N>(i, pack);
#pragma unroll
    for (int k = 0; k < N; ++k)
      if (i + k < size) tensor.set(i + k, pack.of[k]);
  }
};
template <typename T> using Fours = Packs<T, 4>;

// The sum over all threads of a block, in the first thread, always in the same order.
__device__ inline double sum_of_block(double v, Shared<double, kTableThreads>& scratch) {
  scratch[threadIdx.x] = v;
  for (unsigned half = kTableThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
  }
  return scratch[0];
}

// partial[done + chunk] = sum of x^2 over each chunk; `done` is the number of chunks in earlier tables.
template <typename T>
__global__ void __launch_bounds__(kTableThreads)
    squared_norm_kernel(Table<1> table, int64_t chunk, Array<double> partial, int64_t done) {
  __shared__ Shared<double, kTableThreads> scratch;
  const Part part = own_part(table, chunk);
  constexpr int N = 16 / sizeof(T);
  const Packs<T, N> x(table.pointers[part.tensor][0], table.size[part.tensor]);
  double sum = 0;
  for_each<N, 4>(part, [&](int64_t i) {
    const Pack<T, N> v = x.load(i);
    for (int k = 0; k < N; ++k) sum += double(to_float(v.of[k])) * to_float(v.of[k]);
  });
  sum = sum_of_block(sum, scratch);
  if (threadIdx.x == 0) partial.set(done + blockIdx.x, sum);
}

// total = sum of partial, by one block.
__global__ void __launch_bounds__(kTableThreads)
    sum_doubles(Array<double> partial, int64_t num_partials, Array<double> total) {
  __shared__ Shared<double, kTableThreads> scratch;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < num_partials; i += blockDim.x) sum += partial.get(i);
  sum = sum_of_block(sum, scratch);
  if (threadIdx.x == 0) total.set(0, sum);
}

// partial[done + chunk] = the largest |x| of each chunk; the bits of NaN are larger than those of numbers.
template <typename T>
__global__ void __launch_bounds__(kTableThreads)
    largest_kernel(Table<1> table, int64_t chunk, Array<float> partial, int64_t done) {
  __shared__ Shared<unsigned, 1> most;
  if (threadIdx.x == 0) most[0] = 0;
  __syncthreads();
  const Part part = own_part(table, chunk);
  constexpr int N = 16 / sizeof(T);
  const Packs<T, N> x(table.pointers[part.tensor][0], table.size[part.tensor]);
  unsigned largest = 0;
  for_each<N, 4>(part, [&](int64_t i) {
    const Pack<T, N> v = x.load(i);
    for (int k = 0; k < N; ++k) {
      const unsigned bits = bits_as<unsigned>(to_float(v.of[k])) & 0x7fffffffu;
      largest = bits > largest ? bits : largest;
    }
  });
  largest = largest_of_warp(largest);
  if (threadIdx.x % 32 == 0) atomicMax(&most[0], largest);
  __syncthreads();
  if (threadIdx.x == 0) partial.set(done + blockIdx.x, bits_as<float>(most[0]));
}

template <typename T>
__global__ void __launch_bounds__(kTableThreads) scale_kernel(Table<1> table, int64_t chunk, float factor) {
  const Part part = own_part(table, chunk);
  constexpr int N = 16 / sizeof(T);
  const Packs<T, N> x(table.pointers[part.tensor][0], table.size[part.tensor]);
  for_each<N, 4>(part, [&](int64_t i) {
    Pack<T, N> v = x.load(i);
    for (int k = 0; k < N; ++k) v.of[k] = from_float<T>(to_float(v.of[k]) * factor);
    x.store(i, v);
  });
}

struct AdamW { float factor, beta1, rest1, beta2, rest2, keep, step_size, correction, epsilon; };

// For gradients of type G. The copy's dtype is a runtime branch, uniform over threads; as a template parameter it gave
// nine kernels.
template <typename G>
__global__ void __launch_bounds__(kTableThreads)
    adamw_kernel(Table<5> table, int64_t chunk, int64_t copy_dtype, AdamW by) {
  const Part part = own_part(table, chunk);
  const int64_t size = table.size[part.tensor];
  const Fours<G> grad(table.pointers[part.tensor][0], size);
  const Fours<float> weight(table.pointers[part.tensor][1], size), mean(table.pointers[part.tensor][2], size),
      square(table.pointers[part.tensor][3], size);
  const Fours<bf16> copy(table.pointers[part.tensor][4], size);  // an fp16's bits are passed as bf16
  const bool is_fp16 = copy_dtype == Float16, has_copy = copy.tensor && (is_fp16 || copy_dtype == BFloat16);
  for_each<4, 1>(part, [&](int64_t i) {
    const Pack<G, 4> grads = grad.load(i);
    Pack<float, 4> m = mean.load(i), v = square.load(i), w = weight.load(i);
    for (int k = 0; k < 4; ++k) {
      const float g = to_float(grads.of[k]) * by.factor;
      m.of[k] = m.of[k] * by.beta1 + g * by.rest1;
      v.of[k] = v.of[k] * by.beta2 + g * g * by.rest2;
      w.of[k] = w.of[k] * by.keep - m.of[k] * by.step_size / (sqrtf(v.of[k]) * by.correction + by.epsilon);
    }
    mean.store(i, m);
    square.store(i, v);
    weight.store(i, w);
    if (!has_copy) return;
    Pack<bf16, 4> narrow;
    for (int k = 0; k < 4; ++k) {
      narrow.of[k] = is_fp16 ? of_bits<bf16>(bits_of(from_float<fp16>(w.of[k]))) : from_float<bf16>(w.of[k]);
    }
    copy.store(i, narrow);
  });
}

}  // namespace megatron
