// The C interface of the CUDA library: casts to 8 bits.
#include "cuda/fp8.cuh"

#include "cuda/launch.cuh"

using namespace megatron;

namespace {

// Calls launch(T(), Int<N>) for packs of N elements, 16 bytes if the alignment of rows allows it.
template <typename F> const char* with_packs(int64_t dtype, const Blocked& in, const void* x, F launch) {
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    constexpr int kPack = 16 / sizeof(T);
    return in_packs<T>({x}, {in.columns}) ? launch(type, Int<kPack>{}) : launch(type, Int<1>{});
  });
}

int64_t blocks_of(const Blocked& in) {
  return in.matrices * Blocked::parts(in.rows, in.block_rows) * Blocked::parts(in.columns, in.block_columns);
}

}  // namespace

const char* megatron_fp8_amax(int64_t dtype, int64_t matrices, int64_t rows, int64_t columns, int64_t block_rows,
                              int64_t block_columns, const void* x, void* amax, int64_t, void* stream) {
  const Blocked in = Blocked::of(matrices, rows, columns, block_rows, block_columns);
  if (!block_rows || !block_columns || !in.has_tiles_of_blocks()) return kWrongBlocks;
  return with_packs(dtype, in, x, [=](auto type, auto pack) {
    using T = decltype(type);
    auto kernel = fp8_amax_kernel<T, decltype(pack)::value>;
    return LAUNCH(kernel, in.tiles(), kTileThreads, stream, in, Array<T>(x, matrices * rows * columns),
                  Array<float>(amax, blocks_of(in)));
  });
}

const char* megatron_fp8_cast(int64_t dtype, int64_t matrices, int64_t rows, int64_t columns, int64_t block_rows,
                              int64_t block_columns, const void* x, int64_t format, int64_t own, int64_t power_of_two,
                              void* scale, void* data, void* turned, int64_t, void* stream) {
  const Blocked in = Blocked::of(matrices, rows, columns, block_rows, block_columns);
  if (own && (!block_rows || !block_columns || !in.has_tiles_of_blocks())) return kWrongBlocks;
  return with_packs(dtype, in, x, [=](auto type, auto pack) {
    using T = decltype(type);
    constexpr int kPack = decltype(pack)::value;
    const int64_t size = matrices * rows * columns;
    auto kernel = format == E5M2 ? fp8_cast_kernel<NarrowE5M2, T, kPack> : fp8_cast_kernel<NarrowE4M3, T, kPack>;
    return LAUNCH(kernel, in.tiles(), kTileThreads, stream, in, Array<T>(x, size), own != 0, power_of_two != 0,
                  Array<float>(scale, blocks_of(in)), Array<uint8_t>(data, size), Array<uint8_t>(turned, size));
  });
}
