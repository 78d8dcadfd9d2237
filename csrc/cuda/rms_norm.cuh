// RMSNorm: forward uses one block per row; in backward each block processes several rows and their sums for the weight.
#pragma once
#include "cuda/rows.cuh"

namespace megatron {

template <typename T, int N, int kHeld>
__global__ void __launch_bounds__(1024)
    rms_norm_kernel(int64_t columns, Array<T> x, int64_t x_stride, Array<T> weight, float epsilon, Array<T> y,
                    Array<float> rstd) {
  __shared__ Scratch scratch;
  const int64_t row = blockIdx.x, out = row * columns;
  Row<T, N, kHeld> values(x, row * x_stride);
  values.fetch(columns);
  Two sums{0, 0};
  for_packs<kHeld, N>(columns, [&](int slot, int64_t i) {
    const Pack<T, N> v = values.load(slot, i);
    for (int k = 0; k < N; ++k) sums.a += to_float(v.of[k]) * to_float(v.of[k]);
  });
  const float scale = 1.0f / sqrtf(block_sum(sums, scratch).a / columns + epsilon);
  if (threadIdx.x == 0) rstd.set(row, scale);
  for_packs<kHeld, N>(columns, [&](int slot, int64_t i) {
    const Pack<T, N> v = values.load(slot, i), w = weight.template load<N>(i);
    Pack<T, N> normed;
    for (int k = 0; k < N; ++k) normed.of[k] = from_float<T>(to_float(v.of[k]) * scale * to_float(w.of[k]));
    y.template store<N>(out + i, normed);
  });
}

template <typename T, int N, int kHeld>
__global__ void __launch_bounds__(1024)
    rms_norm_backward_kernel(int64_t rows, int64_t columns, Array<T> dy, int64_t dy_stride, Array<T> x,
                             int64_t x_stride, Array<T> weight, Array<float> rstd, Array<T> dx,
                             Array<float> partial) {
  __shared__ Scratch scratch;
  ColumnSums<N, kHeld> dweight(partial, blockIdx.x * columns);
  dweight.clear(columns);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const float scale = rstd.get(row);
    Row<T, N, kHeld> grads(dy, row * dy_stride), values(x, row * x_stride);
    grads.fetch(columns);
    values.fetch(columns);
    Two sums{0, 0};
    for_packs<kHeld, N>(columns, [&](int slot, int64_t i) {
      const Pack<T, N> g = grads.load(slot, i), v = values.load(slot, i), w = weight.template load<N>(i);
      Pack<float, N> added;
      for (int k = 0; k < N; ++k) {
        added.of[k] = to_float(g.of[k]) * to_float(v.of[k]) * scale;
        sums.a += added.of[k] * to_float(w.of[k]);
      }
      dweight.add(slot, i, added);
    });
    const float slope = block_sum(sums, scratch).a / columns * scale;
    for_packs<kHeld, N>(columns, [&](int slot, int64_t i) {
      const Pack<T, N> g = grads.load(slot, i), v = values.load(slot, i), w = weight.template load<N>(i);
      Pack<T, N> grad;
      for (int k = 0; k < N; ++k) {
        const float d = scale * (to_float(g.of[k]) * to_float(w.of[k]) - to_float(v.of[k]) * slope);
        grad.of[k] = from_float<T>(d);
      }
      dx.template store<N>(row * columns + i, grad);
    });
  }
  dweight.write(columns);
}

}  // namespace megatron
