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

Scales scales_of(const Blocked& in, PartGrid grid, int64_t source, const void* amax, void* scale, void* inverse,
                 int64_t inverse_row, int64_t inverse_column) {
  return {source, Array<float>(amax, in.amaxes(grid)), Array<float>(scale, source == kOne ? 1 : in.blocks()),
          Array<float>(inverse, in.blocks()), inverse_row, inverse_column};
}

}  // namespace

const char* megatron_fp8_amax(int64_t dtype, int64_t matrices, int64_t rows, int64_t columns, const void* x,
                              int64_t row_parts, int64_t column_parts, int64_t block_rows, int64_t block_columns,
                              void* amax, int64_t other_rows, int64_t other_columns, void* other_amax, int64_t,
                              void* stream) {
  const Blocked in = Blocked::of(matrices, rows, columns, block_rows, block_columns);
  const Blocked other = Blocked::of(matrices, rows, columns, other_rows, other_columns);
  const PartGrid grid{row_parts, column_parts};
  if (!in.fits_tiles() || (other_amax && !other.fits_tiles())) return kWrongBlocks;
  if (!in.fits_parts(grid)) return kWrongParts;
  return with_packs(dtype, in, x, [=](auto type, auto pack) {
    using T = decltype(type);
    auto kernel = fp8_amax_kernel<T, decltype(pack)::value>;
    return LAUNCH(kernel, matrices * row_parts * column_parts, kTileThreads, stream, in, other, grid,
                  Array<T>(x, matrices * rows * columns), Array<float>(amax, in.amaxes(grid)),
                  Array<float>(other_amax, other.amaxes(grid)));
  });
}

const char* megatron_fp8_cast(int64_t dtype, int64_t matrices, int64_t rows, int64_t columns, const void* x,
                              int64_t format, int64_t power_of_two, int64_t row_parts, int64_t column_parts,
                              int64_t is_shared, void* recorded, int64_t block_rows, int64_t block_columns,
                              int64_t source, const void* amax, void* scale, void* inverse, int64_t inverse_row,
                              int64_t inverse_column, void* data, int64_t other_rows, int64_t other_columns,
                              int64_t other_source, const void* other_amax, void* other_scale, void* other_inverse,
                              int64_t other_inverse_row, int64_t other_inverse_column, void* turned, int64_t,
                              void* stream) {
  const Blocked in = Blocked::of(matrices, rows, columns, block_rows, block_columns);
  const Blocked other = Blocked::of(matrices, rows, columns, other_rows, other_columns);
  const PartGrid grid{row_parts, column_parts};
  if (!has_blocks(in, source) || !has_blocks(other, other_source)) return kWrongBlocks;
  const int64_t size = matrices * rows * columns;
  const Cast cast{in,
                  other,
                  scales_of(in, grid, source, amax, scale, inverse, inverse_row, inverse_column),
                  scales_of(other, grid, other_source, other_amax, other_scale, other_inverse, other_inverse_row,
                            other_inverse_column),
                  grid,
                  is_shared != 0,
                  power_of_two != 0,
                  Array<uint8_t>(data, size),
                  Array<uint8_t>(turned, size),
                  Array<unsigned>(recorded, 1)};
  return with_packs(dtype, in, x, [=](auto type, auto pack) {
    using T = decltype(type);
    constexpr int kPack = decltype(pack)::value;
    auto kernel = format == E5M2 ? fp8_cast_kernel<NarrowE5M2, T, kPack> : fp8_cast_kernel<NarrowE4M3, T, kPack>;
    return LAUNCH(kernel, in.tiles(), kTileThreads, stream, cast, Array<T>(x, size));
  });
}

const char* megatron_fp8_roll(int64_t, int64_t numbers, int64_t steps, int64_t takes_largest, double divisor,
                              double largest0, double largest1, double largest2, void* latest, void* history,
                              void* scale, void* inverse, int64_t, void* stream) {
  auto floats = [](void* p) { return static_cast<float*>(p); };
  const Roll roll{steps, takes_largest != 0, divisor, {largest0, largest1, largest2}, floats(latest), floats(history),
                  floats(scale), floats(inverse)};
  return LAUNCH(fp8_roll_kernel, (numbers + kTileThreads - 1) / kTileThreads, kTileThreads, stream, roll, numbers);
}
