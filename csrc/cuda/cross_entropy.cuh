// Cross entropy of a part of a vocabulary, one block a row: its parts forward, the gradient of the logits backward.
#pragma once
#include <cmath>

#include "cuda/rows.cuh"

namespace megatron {

// Packs that a thread has under way at once: what comes next is not known to be another place than what is written.
constexpr int kForwardPacks = 4, kBackwardPacks = 2;

// Of some elements of a row: their maximum, the sum of exponentials relative to it, their sum.
struct RowParts { float maximum, exp_sum, sum; };

// What exponentials are relative to: where all logits are -inf not their maximum, because -inf - -inf is NaN.
__device__ inline float zero_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

// For 16-bit logits by the processor's own function, without which the pass would wait for arithmetic, not for memory.
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

// Calls f(packs, columns, count) for the packs of the columns [0, packed) that are this thread's, up to kPacks at once.
template <int kPacks, typename T, int N, typename F>
__device__ inline void for_some_packs(Array<T> tensor, int64_t begin, int64_t packed, F f) {
  const int64_t step = int64_t(blockDim.x) * N;
  for (int64_t first = int64_t(threadIdx.x) * N; first < packed; first += kPacks * step) {
    Pack<T, N> packs[kPacks] = {};
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (first + p * step < packed) packs[p] = tensor.template load<N>(begin + first + p * step);
    }
    f(packs, first, step);
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(512)
    cross_entropy_parts_kernel(int64_t rows, int64_t valid, Array<T> logits, int64_t stride, Array<int64_t> target,
                               int64_t first_token, Array<float> parts) {
  __shared__ Shared<RowParts, 32> scratch;
  const int64_t row = blockIdx.x, begin = row * stride, packed = valid / N * N;
  RowParts own{-INFINITY, 0, 0};
  for_some_packs<kForwardPacks, T, N>(logits, begin, packed, [&](const Pack<T, N>* packs, int64_t first, int64_t step) {
    float maximum = own.maximum;
#pragma unroll
    for (int p = 0; p < kForwardPacks; ++p) {
      if (first + p * step >= packed) continue;
      for (int k = 0; k < N; ++k) maximum = fmaxf(maximum, to_float(packs[p].of[k]));
    }
    const float zero = zero_of(maximum);
    own.exp_sum *= expf(own.maximum - zero);
    own.maximum = maximum;
#pragma unroll
    for (int p = 0; p < kForwardPacks; ++p) {
      if (first + p * step >= packed) continue;
      for (int k = 0; k < N; ++k) {
        const float z = to_float(packs[p].of[k]);
        own.exp_sum += exp_of<T>(z - zero);
        own.sum += z;
      }
    }
  });
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
  const float loss = dloss.get(row), maximum = statistics.get(row), scale = loss / statistics.get(rows + row);
  auto gradient = [=](T z) { return expf(to_float(z) - maximum) * scale - loss * spread; };
  // The thread that writes the target's element reads it first and writes it once more at the end.
  const int64_t label = target.get(row) - first_token;
  const int64_t writer = label < packed ? label / N % blockDim.x : label - packed;
  const bool mine = 0 <= label && label < valid && writer == threadIdx.x;
  const float at_target = mine ? gradient(logits.get(begin + label)) - loss * kept : 0.0f;
  for_some_packs<kBackwardPacks, T, N>(logits, begin, packed, [&](const Pack<T, N>* packs, int64_t first, int64_t step) {
#pragma unroll
    for (int p = 0; p < kBackwardPacks; ++p) {
      if (first + p * step >= packed) continue;
      Pack<T, N> grad;
      for (int k = 0; k < N; ++k) grad.of[k] = from_float<T>(gradient(packs[p].of[k]));
      dlogits.template store<N>(out + first + p * step, grad);
    }
  });
  for (int64_t i = packed + threadIdx.x; i < columns; i += blockDim.x) {
    dlogits.set(out + i, from_float<T>(i < valid ? gradient(logits.get(begin + i)) : 0.0f));
  }
  if (mine) dlogits.set(out + label, from_float<T>(at_target));
}

}  // namespace megatron
