// Matrix products in which each element is a sum in a fixed order, whatever the numbers of rows and columns, the
// strides, the addresses and the threads are: the bits depend only on the ranges of the inner index.
#pragma once
#include "common/interface.h"

namespace megatron {
// A range of the inner index: the offsets of its first elements in a and b, its length, and the additions after it.
struct InnerRange { int64_t a, b, length, additions; };
}  // namespace megatron

// out[m, n] = the sum over ranges of sum_k a[m, k] b[k, n], with a[m, k] at a + m * a_row + k * a_step and b[k, n] at
// b + n * b_column + k * b_step, all Float32 or all BFloat16. The products of a range are added one after the other in
// float. Each range's sum is rounded to the dtype and put on a stack, whose two upper values are then added, and the
// sum rounded, `additions` times; one value is left at the end.
MEGATRON_API const char* megatron_fixed_products(int64_t dtype, void* out, int64_t out_row, const void* a,
                                                 int64_t a_row, int64_t a_step, const void* b, int64_t b_column,
                                                 int64_t b_step, int64_t rows, int64_t columns, const void* ranges,
                                                 int64_t num_ranges, int64_t threads, void* stream);
// total[m, n] += each range's sum, rounded to a multiple of `unit` (a power of two), or nan if its magnitude is above
// `limit`; `total` is double, the others are as above, and `additions` is not read.
MEGATRON_API const char* megatron_add_exact_products(int64_t dtype, void* total, int64_t total_row, const void* a,
                                                     int64_t a_row, int64_t a_step, const void* b, int64_t b_column,
                                                     int64_t b_step, int64_t rows, int64_t columns,
                                                     const void* ranges, int64_t num_ranges, double unit,
                                                     double limit, int64_t threads, void* stream);
// The kernel of both functions for a dtype in this process: "vectors" (the library's own), "avx512" or "amx"; null if
// there is none. Its sums have another order, or round at other places, than another kernel's.
MEGATRON_API const char* megatron_fixed_kernel(int64_t dtype);
// For tests: from now on this process uses "vectors" only (0), "avx512" at most (1), or the best kernel (2, the default).
MEGATRON_API void megatron_limit_fixed_kernels(int64_t most);
