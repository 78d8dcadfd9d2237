// Operations on lists of tensors.
//
// A list is a table of int64 in the host's memory. It has a row for each entry of the list: the number of elements,
// above zero, and pointers to the contiguous tensors of so many elements that belong together. Elements are dealt in
// chunks of `chunk`, a multiple of 64; each chunk is the work of one thread of a CPU or of one block of a GPU.
#pragma once
#include "common/interface.h"

// total = sum of x^2 over all elements of all tensors, in double; table [num_tensors, 2]: size, x. It comes by way of
// partial [num_partials] of double, one sum for each chunk: those of the first tensor, then those of the second, ...
MEGATRON_API const char* megatron_squared_norm(int64_t dtype, int64_t num_tensors, const void* table, int64_t chunk,
                                               void* partial, int64_t num_partials, void* total, int64_t threads,
                                               void* stream);

// x *= factor; table [num_tensors, 2]: size, x.
MEGATRON_API const char* megatron_scale(int64_t dtype, int64_t num_tensors, const void* table, int64_t chunk,
                                        double factor, int64_t threads, void* stream);

// g = factor * grad; m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g^2;
// w = keep * w - step_size * m / (sqrt(v) * correction + epsilon); copy = w, rounded, where there is a copy.
// table [num_tensors, 6]: size, grad, w, m, v, copy (null where there is none). w, m and v are float, and double for
// gradients that are; those have no copy. Other dtypes than BFloat16 and Float16 for the copy stand for none.
MEGATRON_API const char* megatron_adamw(int64_t grad_dtype, int64_t copy_dtype, int64_t num_tensors, const void* table,
                                        int64_t chunk, double factor, double beta1, double beta2, double keep,
                                        double step_size, double correction, double epsilon, int64_t threads,
                                        void* stream);
