// Dropout with bias and residual: a block goes through rows, with their sums where they are wanted (backward).
#pragma once
#include "common/dropout.h"
#include "cuda/rows.cuh"

namespace megatron {

// The halves of N channels from i on, which is a multiple of N; N is 1, 4 or 8.
template <int N>
__device__ inline void draw(const Mask& mask, Place place, int64_t sample, int64_t i, uint32_t (&halves)[N]) {
  Four<uint64_t> words[1] = {mask.counter(static_cast<uint64_t>(i / 8), place, sample)};
  philox(words, Keys(mask.key));
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const int64_t half = N == 8 ? k : i % 8 + k;
    const uint64_t even = half & 4 ? words[0].of[2] : words[0].of[0], odd = half & 4 ? words[0].of[3] : words[0].of[1];
    halves[k] = static_cast<uint32_t>(half & 2 ? odd : even) >> (half & 1 ? 16 : 0) & 0xffff;
  }
}

template <typename T, int N, int kHeld>
__global__ void __launch_bounds__(512)
    dropout_kernel(Mask mask, int64_t columns, Array<T> x, Strides of_x, Array<T> bias, Array<T> residual,
                   Strides of_residual, float scale, Array<int64_t> sample_index, Array<T> y, Strides of_y,
                   Array<float> partial) {
  ColumnSums<N, kHeld> sums(partial, blockIdx.x * columns);
  if (partial) sums.clear(columns);
  for (int64_t row = blockIdx.x; row < mask.rows(); row += gridDim.x) {
    const Place place = mask.place(row);
    const int64_t sample = sample_index ? sample_index.get(place.sample) : 0, to = of_y.at(place);
    Row<T, N, kHeld> values(x, of_x.at(place)), residuals(residual, of_residual.at(place));
    values.fetch(columns);
    if (residual) residuals.fetch(columns);
    for_packs<kHeld, N>(columns, [&](int slot, int64_t i) {
      const Pack<T, N> v = values.load(slot, i);
      Pack<T, N> b{}, r{}, out;
      if (bias) b = bias.template load<N>(i);
      if (residual) r = residuals.load(slot, i);
      uint32_t halves[N] = {};
      if (mask.threshold) draw<N>(mask, place, sample, i, halves);
      Pack<float, N> dropped;
      for (int k = 0; k < N; ++k) {
        const float value = bias ? to_float(v.of[k]) + to_float(b.of[k]) : to_float(v.of[k]);
        dropped.of[k] = halves[k] >= mask.threshold ? value * scale : 0.0f;
        out.of[k] = from_float<T>(residual ? dropped.of[k] + to_float(r.of[k]) : dropped.of[k]);
      }
      if (partial) sums.add(slot, i, dropped);
      y.template store<N>(to + i, out);
    });
  }
  if (partial) sums.write(columns);
}

}  // namespace megatron
