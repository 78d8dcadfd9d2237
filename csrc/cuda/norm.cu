// The C interface of the CUDA library: rms_norm and layer_norm.
#include "common/norm.h"
#include "cuda/launch.cuh"
#include "cuda/layer_norm.cuh"
#include "cuda/rms_norm.cuh"

using namespace megatron;

// The largest blocks, and packs per thread, for which nvcc finds registers without spills; backward also holds the sums
// for the weight, and LayerNorm those for the bias.
constexpr int kNormThreads = 1024, kNormHeld = 4, kRmsBackwardHeld = 2;
constexpr int kLayerBackwardThreads = 512, kLayerBackwardHeld = 4;

// The second row of statistics [2, rows].
static const float* second(const void* statistics, int64_t rows) {
  return static_cast<const float*>(statistics) + rows;
}

const char* megatron_rms_norm(int64_t dtype, int64_t rows, int64_t columns, const void* x, int64_t x_stride,
                              const void* weight, double epsilon, void* y, void* rstd, int64_t, void* stream) {
  if (rows == 0) return nullptr;
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    const bool packed = in_packs<T>({x, weight, y}, {x_stride, columns});
    return with_row<T, kNormThreads, kNormHeld>(columns, packed, [=](auto n, auto held, int threads) {
      auto kernel = rms_norm_kernel<T, decltype(n)::value, decltype(held)::value>;
      return LAUNCH(kernel, rows, threads, stream, columns, Array<T>(x, extent(rows, x_stride, columns)),
                    x_stride, Array<T>(weight, columns), static_cast<float>(epsilon), Array<T>(y, rows * columns),
                    Array<float>(rstd, rows));
    });
  });
}

const char* megatron_rms_norm_backward(int64_t dtype, int64_t rows, int64_t columns, const void* dy,
                                       int64_t dy_stride, const void* x, int64_t x_stride, const void* weight,
                                       const void* rstd, void* dx, void* dweight, void* partial, int64_t num_partials,
                                       int64_t, void* stream) {
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    const bool packed = in_packs<T>({dy, x, weight, dx}, {dy_stride, x_stride, columns});
    auto launch = [=](auto n, auto held, int threads) {
      auto kernel = rms_norm_backward_kernel<T, decltype(n)::value, decltype(held)::value>;
      return LAUNCH(kernel, num_partials, threads, stream, rows, columns,
                    Array<T>(dy, extent(rows, dy_stride, columns)), dy_stride,
                    Array<T>(x, extent(rows, x_stride, columns)), x_stride, Array<T>(weight, columns),
                    Array<float>(rstd, rows), Array<T>(dx, rows * columns),
                    Array<float>(partial, num_partials * columns));
    };
    const char* error = with_row<T, kNormThreads, kRmsBackwardHeld>(columns, packed, launch);
    if (error) return error;
    return join_partials<T>(partial, num_partials, columns, 0, dweight, columns, stream);
  });
}

const char* megatron_layer_norm(int64_t dtype, int64_t rows, int64_t columns, const void* x, int64_t x_stride,
                                const void* weight, const void* bias, double epsilon, void* y, void* statistics,
                                int64_t, void* stream) {
  if (rows == 0) return nullptr;
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    const bool packed = in_packs<T>({x, weight, bias, y}, {x_stride, columns});
    return with_row<T, kNormThreads, kNormHeld>(columns, packed, [=](auto n, auto held, int threads) {
      auto kernel = layer_norm_kernel<T, decltype(n)::value, decltype(held)::value>;
      return LAUNCH(kernel, rows, threads, stream, columns, Array<T>(x, extent(rows, x_stride, columns)),
                    x_stride, Array<T>(weight, columns), Array<T>(bias, columns), static_cast<float>(epsilon),
                    Array<T>(y, rows * columns), Array<float>(statistics, rows),
                    Array<float>(second(statistics, rows), rows));
    });
  });
}

const char* megatron_layer_norm_backward(int64_t dtype, int64_t rows, int64_t columns, const void* dy,
                                         int64_t dy_stride, const void* x, int64_t x_stride, const void* weight,
                                         const void* statistics, void* dx, void* dweight, void* dbias, void* partial,
                                         int64_t num_partials, int64_t, void* stream) {
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    const bool packed = in_packs<T>({dy, x, weight, dx}, {dy_stride, x_stride, columns});
    auto launch = [=](auto n, auto held, int threads) {
      auto kernel = layer_norm_backward_kernel<T, decltype(n)::value, decltype(held)::value>;
      return LAUNCH(kernel, num_partials, threads, stream, rows, columns,
                    Array<T>(dy, extent(rows, dy_stride, columns)), dy_stride,
                    Array<T>(x, extent(rows, x_stride, columns)), x_stride, Array<T>(weight, columns),
                    Array<float>(statistics, rows), Array<float>(second(statistics, rows), rows),
                    Array<T>(dx, rows * columns),
                    Array<float>(partial, num_partials * 2 * columns));
    };
    const char* error = with_row<T, kLayerBackwardThreads, kLayerBackwardHeld>(columns, packed, launch);
    if (error) return error;
    error = join_partials<T>(partial, num_partials, 2 * columns, 0, dweight, columns, stream);
    if (error) return error;
    return join_partials<T>(partial, num_partials, 2 * columns, columns, dbias, columns, stream);
  });
}
