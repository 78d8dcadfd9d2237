// Operations on lists of tensors.
//
// A list is a table of int64 in the host's memory, with a row per entry: the number of elements, > 0, and pointers to
// corresponding contiguous tensors of that size. Elements are divided into chunks of `chunk`, a multiple of 64; each
// chunk is processed by one CPU thread or one GPU block.
#pragma once
#include "common/interface.h"

// total = sum of x^2 over all elements of all tensors, in double; table [num_tensors, 2]: size, x. partial
// [num_partials] of double has one sum per chunk, in the order of the tensors.
MEGATRON_API const char* megatron_squared_norm(int64_t dtype, int64_t num_tensors, const void* table, int64_t chunk,
                                               void* partial, int64_t num_partials, void* total, int64_t threads,
                                               void* stream);

// partial [num_partials] = the largest |x| of each chunk, in the order of the tensors; NaN if there is a NaN; float, or
// double for Float64. table [num_tensors, 2]: size, x.
MEGATRON_API const char* megatron_largest(int64_t dtype, int64_t num_tensors, const void* table, int64_t chunk,
                                          void* partial, int64_t num_partials, int64_t threads, void* stream);

// x *= factor; table [num_tensors, 2]: size, x.
MEGATRON_API const char* megatron_scale(int64_t dtype, int64_t num_tensors, const void* table, int64_t chunk,
                                        double factor, int64_t threads, void* stream);

// g = factor * grad; m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g^2; w = keep * w - step_size * m /
// (sqrt(v) * correction + epsilon); copy = w, rounded, if there is a copy. table [num_tensors, 6]: size, grad, w, m, v,
// copy (null if there is none). w, m and v are float, or double for double gradients, which have no copy. Dtypes of the
// copy other than BFloat16 and Float16 mean that there is none.
MEGATRON_API const char* megatron_adamw(int64_t grad_dtype, int64_t copy_dtype, int64_t num_tensors, const void* table,
                                        int64_t chunk, double factor, double beta1, double beta2, double keep,
                                        double step_size, double correction, double epsilon, int64_t threads,
                                        void* stream);
