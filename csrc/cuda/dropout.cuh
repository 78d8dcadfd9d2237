// Dropout with bias and residual: a block processes rows, and their sums if required (backward).
#pragma once
#include "common/dropout.h"
#include "cuda/rows.cuh"

namespace megatron {

// The halves of N channels from c on, a multiple of N; N is 1, 4 or 8.
template <int N> __device__ inline void draw(const Mask& mask, RowId row, int64_t c, uint32_t (&halves)[N]) {
  Four<uint64_t> words[1] = {dropout_counter(static_cast<uint64_t>(c / 8), row)};
  philox(words, Keys(mask.key));
#pragma unroll
  for (int k = 0; k < N; ++k) halves[k] = half_of(words[0], N == 8 ? k : c % 8 + k);
}

// The halves of the N channels in channel_ids from i on: at once if these are contiguous and start at a multiple of N.
template <int N>
__device__ inline void draw(const Mask& mask, RowId row, Array<int64_t> channel_ids, int64_t i, uint32_t (&halves)[N]) {
  const int64_t first = channel_ids.get(i);
  bool follow = first % N == 0;
  for (int k = 1; k < N; ++k) follow &= channel_ids.get(i + k) == first + k;
  if (follow) return draw<N>(mask, row, first, halves);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    uint32_t half[1];
    draw<1>(mask, row, channel_ids.get(i + k), half);
    halves[k] = half[0];
  }
}

template <typename T, int N, int kHeld>
__global__ void __launch_bounds__(512)
    dropout_kernel(Mask mask, int64_t columns, Array<T> x, Strides of_x, Array<T> bias, Array<T> residual,
                   Strides of_residual, float scale, Array<int64_t> sample_index, Array<int64_t> position_ids,
                   Array<int64_t> channel_ids, Array<T> y, Strides of_y, Array<float> partial) {
  ColumnSums<N, kHeld> sums(partial, blockIdx.x * columns);
  if (partial) sums.clear(columns);
  for (int64_t row = blockIdx.x; row < mask.rows(); row += gridDim.x) {
    const RowId indices = mask.indices(row);
    RowId numbers{indices.position, sample_index ? sample_index.get(indices.sample) : 0,
                  mask.first_head + indices.head};
    if (position_ids) numbers.position = position_ids.get(indices.sample * mask.positions_stride + indices.position);
    const int64_t to = of_y.at(indices);
    Row<T, N, kHeld> values(x, of_x.at(indices)), residuals(residual, of_residual.at(indices));
    values.fetch(columns);
    if (residual) residuals.fetch(columns);
    for_packs<kHeld, N>(columns, [&](int slot, int64_t i) {
      const Pack<T, N> v = values.load(slot, i);
      Pack<T, N> b{}, r{}, out;
      if (bias) b = bias.template load<N>(i);
      if (residual) r = residuals.load(slot, i);
      uint32_t halves[N] = {};
      if constexpr (kHeld == 0) {  // otherwise registers spill
        if (mask.threshold && channel_ids) draw<N>(mask, numbers, channel_ids, i, halves);
      }
      if (mask.threshold && !channel_ids) draw<N>(mask, numbers, i, halves);
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
