// The C interface of the CUDA library: dropout.
#include "common/dropout.h"
#include "cuda/dropout.cuh"
#include "cuda/launch.cuh"

using namespace megatron;

// Maximal packs of x, the residual and the sums per thread without register spills.
constexpr int kDropoutThreads = 512, kDropoutHeld = 4;

int64_t megatron_dropout_kept() { return 0; }

const char* megatron_dropout(int64_t dtype, int64_t length, int64_t batch, int64_t heads, int64_t columns,
                             const void* x, int64_t x_position, int64_t x_sample, int64_t x_head, const void* bias,
                             const void* residual, int64_t residual_position, int64_t residual_sample,
                             int64_t residual_head, int64_t threshold, double scale, int64_t key,
                             const void* sample_index, const void* position_ids, int64_t positions_stride,
                             const void* channel_ids, int64_t first_head, void*, int64_t, void* y, int64_t y_position,
                             int64_t y_sample, int64_t y_head, void* sums, void* partial, int64_t num_partials,
                             int64_t, void* stream) {
  const Mask mask{length,     batch, heads, positions_stride, first_head, static_cast<uint64_t>(key),
                  static_cast<uint32_t>(threshold)};
  const Strides of_x{x_position, x_sample, x_head}, of_y{y_position, y_sample, y_head};
  const Strides of_residual{residual_position, residual_sample, residual_head};
  const RowId last{length - 1, batch - 1, heads - 1};
  const int64_t rows = mask.rows(), blocks = sums ? num_partials : rows;
  if (blocks == 0) return nullptr;
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    const bool packed =
        in_packs<T>({x, bias, residual, y}, {x_position, x_sample, x_head, residual_position, residual_sample,
                                             residual_head, y_position, y_sample, y_head, columns});
    auto launch = [=](auto n, auto held, int threads) {
      constexpr int kPack = decltype(n)::value;
      auto kernel = channel_ids ? dropout_kernel<T, kPack, 0> : dropout_kernel<T, kPack, decltype(held)::value>;
      return LAUNCH(kernel, blocks, threads, stream, mask, columns, Array<T>(x, of_x.at(last) + columns), of_x,
                    Array<T>(bias, columns), Array<T>(residual, of_residual.at(last) + columns), of_residual,
                    static_cast<float>(scale), Array<int64_t>(sample_index, batch),
                    Array<int64_t>(position_ids, (batch - 1) * positions_stride + length),
                    Array<int64_t>(channel_ids, columns), Array<T>(y, of_y.at(last) + columns), of_y,
                    Array<float>(partial, blocks * columns));
    };
    const char* error = with_row<T, kDropoutThreads, kDropoutHeld>(columns, packed, launch);
    if (error || !sums) return error;
    return join_partials<T>(partial, num_partials, columns, 0, sums, columns, stream);
  });
}
