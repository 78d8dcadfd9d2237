// The activation functions of the feed-forward layer, fused with the addition of the bias.
#pragma once
#include "common/interface.h"

namespace megatron {
// gelu(x) = x Phi(x) or its tanh form, relu(x)^2; and gated: f(gate) * value with f = silu, gelu or its tanh form.
enum Activation : int64_t { Gelu = 0, GeluTanh = 1, SquaredRelu = 2, SwiGlu = 3, GeGlu = 4, GeGluTanh = 5 };
constexpr bool is_activation(int64_t number) { return number >= Gelu && number <= GeGluTanh; }
constexpr bool is_gated(int64_t number) { return number >= SwiGlu; }
constexpr const char* kWrongActivation = "unsupported activation";
}  // namespace megatron

// y = f(x + bias), [rows, columns]. For gated f, rows of x and the bias have 2 * columns: first the gate, then the
// value. bias may be null.
MEGATRON_API const char* megatron_bias_activation(int64_t dtype, int64_t activation, int64_t rows, int64_t columns,
                                                  const void* x, int64_t x_stride, const void* bias, void* y,
                                                  int64_t threads, void* stream);

// dx = dy f'(x + bias), with the width of x; dbias = sum of dx over rows, by way of partial [num_partials, width of x].
// dbias and partial are null if bias is.
MEGATRON_API const char* megatron_bias_activation_backward(int64_t dtype, int64_t activation, int64_t rows,
                                                           int64_t columns, const void* dy, int64_t dy_stride,
                                                           const void* x, int64_t x_stride, const void* bias, void* dx,
                                                           void* dbias, void* partial, int64_t num_partials,
                                                           int64_t threads, void* stream);
