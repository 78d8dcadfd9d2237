// The C interface of the CUDA library: bias_activation.
#include "cuda/activation.cuh"
#include "cuda/launch.cuh"

using namespace megatron;

namespace {

// Rows per thread if nothing is summed over them: enough to prefetch and to reuse the bias.
constexpr int64_t kActivationThreads = 256, kActivationRows = 4;

// Calls launch(Int<N>, Int<pieces>, strips, threads); a thread has N columns of each piece.
template <typename T, typename F>
const char* with_strips(int64_t activation, int64_t columns, bool packed, F launch) {
  constexpr int kPack = 16 / sizeof(T);
  auto strips = [=](auto n, auto pieces) {
    const int64_t packs = columns / n;
    const int64_t threads = packs < kActivationThreads ? (packs + 31) / 32 * 32 : kActivationThreads;
    return launch(n, pieces, static_cast<unsigned>((packs + threads - 1) / threads), threads);
  };
  if (is_gated(activation)) return packed ? strips(Int<kPack>{}, Int<2>{}) : strips(Int<1>{}, Int<2>{});
  return packed ? strips(Int<kPack>{}, Int<1>{}) : strips(Int<1>{}, Int<1>{});
}

}  // namespace

const char* megatron_bias_activation(int64_t dtype, int64_t activation, int64_t rows, int64_t columns, const void* x,
                                     int64_t x_stride, const void* bias, void* y, int64_t, void* stream) {
  if (!is_activation(activation)) return kWrongActivation;
  if (rows == 0) return nullptr;
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    const bool packed = in_packs<T>({x, bias, y}, {x_stride, columns});
    return with_strips<T>(activation, columns, packed, [=](auto n, auto pieces, unsigned strips, int64_t threads) {
      auto kernel = bias_activation_kernel<T, decltype(n)::value, decltype(pieces)::value>;
      const int64_t width = pieces * columns, parts = (rows + kActivationRows - 1) / kActivationRows;
      return LAUNCH(kernel, strips * parts, threads, stream, activation, rows, columns, strips,
                    Array<T>(x, extent(rows, x_stride, width)), x_stride, Array<T>(bias, width),
                    Array<T>(y, rows * columns));
    });
  });
}

const char* megatron_bias_activation_backward(int64_t dtype, int64_t activation, int64_t rows, int64_t columns,
                                              const void* dy, int64_t dy_stride, const void* x, int64_t x_stride,
                                              const void* bias, void* dx, void* dbias, void* partial,
                                              int64_t num_partials, int64_t, void* stream) {
  if (!is_activation(activation)) return kWrongActivation;
  if (rows == 0 && !bias) return nullptr;
  const int64_t width = is_gated(activation) ? 2 * columns : columns;
  const int64_t parts = bias ? num_partials : (rows + kActivationRows - 1) / kActivationRows;
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    const bool packed = in_packs<T>({dy, x, bias, dx}, {dy_stride, x_stride, columns});
    const char* error = with_strips<T>(
        activation, columns, packed, [=](auto n, auto pieces, unsigned strips, int64_t threads) {
          auto kernel = bias_activation_backward_kernel<T, decltype(n)::value, decltype(pieces)::value>;
          return LAUNCH(kernel, strips * parts, threads, stream, activation, rows, columns, strips,
                        Array<T>(dy, extent(rows, dy_stride, columns)), dy_stride,
                        Array<T>(x, extent(rows, x_stride, width)), x_stride, Array<T>(bias, width),
                        Array<T>(dx, rows * width), Array<float>(partial, num_partials * width));
        });
    if (error || !bias) return error;
    return join_partials<T>(partial, num_partials, width, 0, dbias, width, stream);
  });
}
