// Bias and activation: each block processes a strip of columns, so that a thread has the same columns of all its rows.
// It reads the bias once, and sums the gradient of the bias in registers.
#pragma once
#include "cuda/rows.cuh"

namespace megatron {
__device__ inline float vec_abs(float v, float limit) { return fabsf(v) > limit ? limit : fabsf(v); }  // NaN stays NaN
__device__ inline float vec_at_least(float v, float limit) { return v < limit ? limit : v; }
__device__ inline float vec_decay(float v) { return expf(-v); }
__device__ inline float vec_short_exp2(float v) { return exp2f(v); }
// Compensates the rounding of the square, which v^2 / 2 would magnify.
__device__ inline float vec_gauss(float v) {
  const float square = v * v, lost = fmaf(v, v, -square), gauss = expf(-0.5f * square);
  return gauss - 0.5f * lost * gauss;
}
}  // namespace megatron

// Included after the functions that it uses.
#include "common/activation_math.h"

namespace megatron {

// A thread's columns, from `column` on, and rows: `row`, then every `step`-th.
struct Share {
  int64_t column, row, step;
  __device__ Share(unsigned strips, int64_t pack)
      : column((blockIdx.x % strips * blockDim.x + threadIdx.x) * pack), row(blockIdx.x / strips),
        step(gridDim.x / strips) {}
};

// Calls use(row, read(row)) for a thread's rows. The next row is read before the previous one is used, so that loads
// overlap with computation.
template <typename Read, typename Use>
__device__ inline void for_rows_ahead(int64_t rows, const Share& share, Read read, Use use) {
  if (share.row >= rows) return;
  auto next = read(share.row);
  for (int64_t row = share.row; row < rows; row += share.step) {
    const auto now = next;
    if (row + share.step < rows) next = read(row + share.step);
    use(row, now);
  }
}

// A thread's columns of a row of x: of the gate, or of everything if not gated, and of the value.
template <typename T, int N, int kPieces> struct Pieces {
  Pack<T, N> of[kPieces];

  __device__ static Pieces load(Array<T> tensor, int64_t begin, int64_t columns) {
    Pieces read{};
    if (tensor)
      for (int piece = 0; piece < kPieces; ++piece) read.of[piece] = tensor.template load<N>(begin + piece * columns);
    return read;
  }
  __device__ float sum(int piece, int k, const Pieces& bias) const {
    return to_float(of[piece].of[k]) + to_float(bias.of[piece].of[k]);
  }
};

template <typename T, int N, int kPieces>
__global__ void __launch_bounds__(256)
    bias_activation_kernel(int64_t activation, int64_t rows, int64_t columns, unsigned strips, Array<T> x,
                           int64_t x_stride, Array<T> bias, Array<T> y) {
  using Inner = Pieces<T, N, kPieces>;
  const Share share(strips, N);
  if (share.column >= columns) return;
  const Inner added = Inner::load(bias, share.column, columns);
  auto read = [&](int64_t row) { return Inner::load(x, row * x_stride + share.column, columns); };
  for_rows_ahead(rows, share, read, [&](int64_t row, const Inner& inner) {
    Pack<T, N> out{};
    with_activation<sizeof(T) == 2>(activation, [&](auto f, auto pieces) {
      if constexpr (decltype(pieces)::value == kPieces) {
        for (int k = 0; k < N; ++k) {
          float v = f(inner.sum(0, k, added)).value;
          if (kPieces == 2) v *= inner.sum(kPieces - 1, k, added);
          out.of[k] = from_float<T>(v);
        }
      }
    });
    y.template store<N>(row * columns + share.column, out);
  });
}

// The sums of block i's rows are written to row i of partial; without a bias there are none.
template <typename T, int N, int kPieces>
__global__ void __launch_bounds__(256)
    bias_activation_backward_kernel(int64_t activation, int64_t rows, int64_t columns, unsigned strips, Array<T> dy,
                                    int64_t dy_stride, Array<T> x, int64_t x_stride, Array<T> bias, Array<T> dx,
                                    Array<float> partial) {
  using Inner = Pieces<T, N, kPieces>;
  struct Both { Pack<T, N> grad; Inner inner; };
  const Share share(strips, N);
  if (share.column >= columns) return;
  const Inner added = Inner::load(bias, share.column, columns);
  Pieces<float, N, kPieces> sums{};
  auto read = [&](int64_t row) {
    return Both{dy.template load<N>(row * dy_stride + share.column),
                Inner::load(x, row * x_stride + share.column, columns)};
  };
  for_rows_ahead(rows, share, read, [&](int64_t row, const Both& both) {
    Inner out{};
    auto put = [&](int piece, int k, float grad) {
      out.of[piece].of[k] = from_float<T>(grad);
      sums.of[piece].of[k] += grad;
    };
    with_activation<sizeof(T) == 2>(activation, [&](auto f, auto pieces) {
      if constexpr (decltype(pieces)::value == kPieces) {
        for (int k = 0; k < N; ++k) {
          const Curve<float> curve = f(both.inner.sum(0, k, added));
          float grad = to_float(both.grad.of[k]);
          if constexpr (kPieces == 2) {
            put(1, k, grad * curve.value);
            grad *= both.inner.sum(1, k, added);
          }
          put(0, k, grad * curve.slope);
        }
      }
    });
    for (int piece = 0; piece < kPieces; ++piece)
      dx.template store<N>((row * kPieces + piece) * columns + share.column, out.of[piece]);
  });
  if (!partial) return;
  for (int piece = 0; piece < kPieces; ++piece)
    store_floats<N>(partial, (share.row * kPieces + piece) * columns + share.column, sums.of[piece]);
}

}  // namespace megatron
