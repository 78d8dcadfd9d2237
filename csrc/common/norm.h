// RMSNorm and LayerNorm.
#pragma once
#include "common/interface.h"

// y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + epsilon).
MEGATRON_API const char* megatron_rms_norm(int64_t dtype, int64_t rows, int64_t columns, const void* x,
                                           int64_t x_stride, const void* weight, double epsilon, void* y, void* rstd,
                                           int64_t threads, void* stream);

// dx = rstd * (weight * dy - xhat * mean(weight * dy * xhat)), xhat = x * rstd; dweight = sum of dy * xhat over
// rows, by way of partial [num_partials, columns].
MEGATRON_API const char* megatron_rms_norm_backward(int64_t dtype, int64_t rows, int64_t columns, const void* dy,
                                                    int64_t dy_stride, const void* x, int64_t x_stride,
                                                    const void* weight, const void* rstd, void* dx, void* dweight,
                                                    void* partial, int64_t num_partials, int64_t threads,
                                                    void* stream);

// y = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(mean((x - mean)^2) + epsilon); statistics
// [2, rows] are mean and rstd.
MEGATRON_API const char* megatron_layer_norm(int64_t dtype, int64_t rows, int64_t columns, const void* x,
                                             int64_t x_stride, const void* weight, const void* bias, double epsilon,
                                             void* y, void* statistics, int64_t threads, void* stream);

// dx = rstd * (weight * dy - mean(weight * dy) - xhat * mean(weight * dy * xhat)), xhat = (x - mean) * rstd;
// dweight as above, dbias = sum of dy, by way of partial [num_partials, 2, columns].
MEGATRON_API const char* megatron_layer_norm_backward(int64_t dtype, int64_t rows, int64_t columns, const void* dy,
                                                      int64_t dy_stride, const void* x, int64_t x_stride,
                                                      const void* weight, const void* statistics, void* dx,
                                                      void* dweight, void* dbias, void* partial, int64_t num_partials,
                                                      int64_t threads, void* stream);
