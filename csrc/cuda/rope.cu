// The C interface of the CUDA library: rope.
#include "common/rope.h"
#include "cuda/launch.cuh"
#include "cuda/rope.cuh"

using namespace megatron;

constexpr int64_t kRopeThreads = 256;

const char* megatron_rope(int64_t dtype, int64_t length, int64_t batch, int64_t groups, int64_t heads,
                          int64_t channels, int64_t rotated, const void* x, int64_t length_stride,
                          int64_t batch_stride, int64_t group_stride, int64_t head_stride, const void* cos,
                          const void* sin, int64_t table_length_stride, int64_t table_batch_stride,
                          int64_t interleaved, int64_t inverse, void* y, int64_t, void* stream) {
  const RopeShape shape{length, batch, groups, heads, channels, rotated, length_stride, batch_stride, group_stride,
                        head_stride, table_length_stride, table_batch_stride};
  const int64_t half = rotated / 2, rows = length * batch, size = rows * groups * heads * channels;
  if (size == 0) return nullptr;
  const int64_t of_heads = extent(groups, group_stride, extent(heads, head_stride, channels));
  const int64_t x_size = extent(length, length_stride, extent(batch, batch_stride, of_heads));
  const int64_t table_size = extent(length, table_length_stride, extent(batch, table_batch_stride, half));
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    const bool packed =
        in_packs<T>({x, y}, {length_stride, batch_stride, group_stride, head_stride, channels, half}) &&
        in_packs<float>({cos, sin}, {table_length_stride, table_batch_stride});
    auto launch = [=](auto n) {
      constexpr int kPack = decltype(n)::value;
      auto kernel = rope_kernel<T, kPack>;
      const int64_t items = groups * heads * (half / kPack);
      const int64_t threads = items < kRopeThreads ? (items + 31) / 32 * 32 : kRopeThreads;
      return LAUNCH(kernel, rows, threads, stream, shape, Array<T>(x, x_size), Array<float>(cos, table_size),
                    Array<float>(sin, table_size), inverse ? -1.0f : 1.0f, interleaved != 0, Array<T>(y, size));
    };
    return packed ? launch(Int<16 / sizeof(T)>{}) : launch(Int<1>{});
  });
}
