// Cross entropy of a part of a vocabulary, one block per row: its statistics in forward, the gradient of the logits in
// backward.
#pragma once
#include <cmath>

#include "cuda/rows.cuh"

namespace megatron {

// Packs of a row that a thread processes at once; it prefetches the same number.
constexpr int kPacks = 2;

// Statistics of some elements of a row: maximum, sum of exponentials relative to it, sum.
struct RowParts { float maximum, exp_sum, sum; };

// The reference of exponentials: not the maximum if all logits are -inf, because -inf - -inf is NaN.
__device__ inline float zero_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

// For 16-bit logits use the hardware's function; otherwise the pass would be limited by arithmetic, not memory.
template <typename T> __device__ inline float exp_of(float v) { return sizeof(T) == 4 ? expf(v) : fast_exp(v); }

__device__ inline RowParts together(RowParts a, RowParts b) {
  const float maximum = fmaxf(a.maximum, b.maximum), zero = zero_of(maximum);
  return {maximum, a.exp_sum * expf(a.maximum - zero) + b.exp_sum * expf(b.maximum - zero), a.sum + b.sum};
}

__device__ inline RowParts warp_parts(RowParts v) {
  for (int lane = 16; lane > 0; lane /= 2) {
    const float maximum = __shfl_xor_sync(0xffffffffu, v.maximum, lane);
    const float exp_sum = __shfl_xor_sync(0xffffffffu, v.exp_sum, lane);
    v = together(v, {maximum, exp_sum, __shfl_xor_sync(0xffffffffu, v.sum, lane)});
  }
  return v;
}

// This thread's packs of a row's columns [0, packed), kPacks at once.
template <typename T, int N> struct SomePacks {
  Array<T> tensor;
  int64_t begin, packed, step, first;
  Pack<T, N> of[kPacks] = {};

  __device__ SomePacks(Array<T> tensor, int64_t begin, int64_t packed)
      : tensor(tensor), begin(begin), packed(packed), step(int64_t(blockDim.x) * N), first(int64_t(threadIdx.x) * N) {
    read();
  }
  __device__ bool any() const { return first < packed; }
  __device__ bool has(int p) const { return first + p * step < packed; }
  // The following packs, whose loads start here.
  __device__ SomePacks next() const {
    SomePacks following = *this;
    following.first += kPacks * step;
    following.read();
    return following;
  }

 private:
  __device__ void read() {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (has(p)) of[p] = tensor.template load<N>(begin + first + p * step);
    }
  }
};

template <typename T, int N>
__global__ void __launch_bounds__(512)
    cross_entropy_parts_kernel(int64_t rows, int64_t valid, Array<T> logits, int64_t stride, Array<int64_t> target,
                               int64_t first_token, Array<float> parts) {
  __shared__ Shared<RowParts, 32> scratch;
  const int64_t row = blockIdx.x, begin = row * stride, packed = valid / N * N;
  RowParts own{-INFINITY, 0, 0};
  SomePacks<T, N> packs(logits, begin, packed);
  while (packs.any()) {
    const auto following = packs.next();
    float maximum = own.maximum;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!packs.has(p)) continue;
      for (int k = 0; k < N; ++k) maximum = fmaxf(maximum, to_float(packs.of[p].of[k]));
    }
    const float zero = zero_of(maximum);
    own.exp_sum *= expf(own.maximum - zero);
    own.maximum = maximum;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!packs.has(p)) continue;
      for (int k = 0; k < N; ++k) {
        const float z = to_float(packs.of[p].of[k]);
        own.exp_sum += exp_of<T>(z - zero);
        own.sum += z;
      }
    }
    packs = following;
  }
  const int64_t rest = packed + threadIdx.x;
  if (rest < valid) {
    const float z = to_float(logits.get(begin + rest));
    own = together(own, {z, 1, z});
  }
  own = warp_parts(own);
  if (blockDim.x > 32) {
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = own;
    __syncthreads();
    own = warp_parts(threadIdx.x % 32 < blockDim.x / 32 ? scratch[threadIdx.x % 32] : RowParts{-INFINITY, 0, 0});
  }
  if (threadIdx.x > 0) return;
  const int64_t label = target.get(row) - first_token;
  parts.set(row, own.maximum);
  parts.set(rows + row, own.exp_sum);
  parts.set(2 * rows + row, 0 <= label && label < valid ? to_float(logits.get(begin + label)) : 0.0f);
  parts.set(3 * rows + row, own.sum);
}

template <typename T, int N>
__global__ void __launch_bounds__(512)
    cross_entropy_backward_kernel(int64_t rows, int64_t columns, int64_t valid, Array<T> logits, int64_t stride,
                                  Array<int64_t> target, int64_t first_token, Array<float> statistics,
                                  Array<float> dloss, float kept, float spread, Array<T> dlogits, int64_t out_stride) {
  const int64_t row = blockIdx.x, begin = row * stride, out = row * out_stride, packed = valid / N * N;
  SomePacks<T, N> packs(logits, begin, packed);  // in flight while the row's numbers are read
  const float loss = dloss.get(row), maximum = statistics.get(row), scale = loss / statistics.get(rows + row);
  const int64_t label = target.get(row) - first_token;
  auto gradient = [=](T z, bool is_target) {
    return from_float<T>(exp_of<T>(to_float(z) - maximum) * scale - loss * spread - (is_target ? loss * kept : 0.0f));
  };
  while (packs.any()) {
    const auto following = packs.next();  // before the stores, which for nvcc might alias it
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!packs.has(p)) continue;
      const int64_t column = packs.first + p * packs.step;
      Pack<T, N> grad;
      for (int k = 0; k < N; ++k) grad.of[k] = gradient(packs.of[p].of[k], column + k == label);
      dlogits.template store<N>(out + column, grad);
    }
    packs = following;
  }
  for (int64_t i = packed + threadIdx.x; i < columns; i += blockDim.x) {
    dlogits.set(out + i, i < valid ? gradient(logits.get(begin + i), i == label) : from_float<T>(0.0f));
  }
}

}  // namespace megatron
