// What every native library offers to Python, whichever device it is for.
//
// Every argument is a pointer, an int64_t or a double, so that the caller needs no table of signatures. Pointers are on
// the library's device; a null pointer stands for what is absent. Rows are `columns` elements that follow one another;
// a stride counts elements between the beginnings of rows. Tensors without a stride are contiguous. `dtype` is a
// DType; `rstd`, `mean` and `partial` are double for Float64, else float. `threads` is for CPUs, `stream` for GPUs.
// A function returns null, or what went wrong.
#pragma once
#include <cstdint>

#define MEGATRON_API extern "C" __attribute__((visibility("default")))

namespace megatron {
// To be counted up with every change of a signature here; megatron_core/ops/native.py calls this version only.
constexpr int kInterface = 1;
enum DType : int64_t { Float32 = 0, Float64 = 1, BFloat16 = 2, Float16 = 3 };
constexpr const char* kWrongDType = "this data type is none of those the operation is built for";
}  // namespace megatron

// kInterface, as the library was built with it.
MEGATRON_API int megatron_interface();

// sum = x + residual (or x where residual is null); y = sum * rstd * weight, rstd = 1 / sqrt(mean(sum^2) + epsilon).
MEGATRON_API const char* megatron_rms_norm(int64_t dtype, int64_t rows, int64_t columns, const void* x,
                                           int64_t x_stride, const void* residual, int64_t residual_stride,
                                           const void* weight, double epsilon, void* y, void* sum, void* rstd,
                                           int64_t threads, void* stream);

// dx = rstd * (weight * dy - xhat * mean(weight * dy * xhat)) + dsum, xhat = x * rstd; dweight = sum of dy * xhat over
// rows, by way of partial [num_partials, columns]; dsum may be null.
MEGATRON_API const char* megatron_rms_norm_backward(int64_t dtype, int64_t rows, int64_t columns, const void* dy,
                                                    int64_t dy_stride, const void* dsum, int64_t dsum_stride,
                                                    const void* x, int64_t x_stride, const void* weight,
                                                    const void* rstd, void* dx, void* dweight, void* partial,
                                                    int64_t num_partials, int64_t threads, void* stream);

// sum as above; y = (sum - mean) * rstd * weight + bias, rstd = 1 / sqrt(mean((sum - mean)^2) + epsilon).
MEGATRON_API const char* megatron_layer_norm(int64_t dtype, int64_t rows, int64_t columns, const void* x,
                                             int64_t x_stride, const void* residual, int64_t residual_stride,
                                             const void* weight, const void* bias, double epsilon, void* y, void* sum,
                                             void* mean, void* rstd, int64_t threads, void* stream);

// dx = rstd * (weight * dy - mean(weight * dy) - xhat * mean(weight * dy * xhat)) + dsum, xhat = (x - mean) * rstd;
// dweight as above, dbias = sum of dy, by way of partial [num_partials, 2, columns].
MEGATRON_API const char* megatron_layer_norm_backward(int64_t dtype, int64_t rows, int64_t columns, const void* dy,
                                                      int64_t dy_stride, const void* dsum, int64_t dsum_stride,
                                                      const void* x, int64_t x_stride, const void* weight,
                                                      const void* mean, const void* rstd, void* dx, void* dweight,
                                                      void* dbias, void* partial, int64_t num_partials,
                                                      int64_t threads, void* stream);
