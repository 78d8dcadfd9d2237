// The C interface of the CUDA library: cross entropy.
#include "common/cross_entropy.h"
#include "cuda/cross_entropy.cuh"
#include "cuda/launch.cuh"

using namespace megatron;

// Calls launch(Int<N>, threads) for a row of `columns`; rows are not held in registers, so any length is possible.
template <typename T, typename F> static const char* with_packs(int64_t columns, bool packed, F launch) {
  constexpr int kPack = 16 / sizeof(T), kThreads = 512;
  const int64_t packs = packed ? (columns / kPack + 2 * kPacks - 1) / (2 * kPacks) : columns;
  const int threads = static_cast<int>(packs >= kThreads ? kThreads : packs < 1 ? 32 : (packs + 31) / 32 * 32);
  return packed ? launch(Int<kPack>{}, threads) : launch(Int<1>{}, threads);
}

const char* megatron_cross_entropy_parts(int64_t dtype, int64_t rows, int64_t valid, const void* logits,
                                         int64_t logits_stride, const void* target, int64_t first, void* parts,
                                         int64_t, void* stream) {
  if (rows == 0) return nullptr;
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    return with_packs<T>(valid, in_packs<T>({logits}, {logits_stride}), [=](auto n, int threads) {
      auto kernel = cross_entropy_parts_kernel<T, decltype(n)::value>;
      return LAUNCH(kernel, rows, threads, stream, rows, valid, Array<T>(logits, extent(rows, logits_stride, valid)),
                    logits_stride, Array<int64_t>(target, rows), first, Array<float>(parts, 4 * rows));
    });
  });
}

const char* megatron_cross_entropy_backward(int64_t dtype, int64_t rows, int64_t columns, int64_t valid,
                                            const void* logits, int64_t logits_stride, const void* target,
                                            int64_t first, const void* statistics, const void* dloss, double kept,
                                            double spread, void* dlogits, int64_t dlogits_stride, int64_t,
                                            void* stream) {
  if (rows == 0) return nullptr;
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    const bool packed = in_packs<T>({logits, dlogits}, {logits_stride, dlogits_stride});
    return with_packs<T>(columns, packed, [=](auto n, int threads) {
      auto kernel = cross_entropy_backward_kernel<T, decltype(n)::value>;
      return LAUNCH(kernel, rows, threads, stream, rows, columns, valid,
                    Array<T>(logits, extent(rows, logits_stride, columns)), logits_stride,
                    Array<int64_t>(target, rows), first, Array<float>(statistics, 2 * rows),
                    Array<float>(dloss, rows), static_cast<float>(kept), static_cast<float>(spread),
                    Array<T>(dlogits, extent(rows, dlogits_stride, columns)), dlogits_stride);
    });
  });
}
