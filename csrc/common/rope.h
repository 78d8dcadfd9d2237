// Rotary positions: pairs of channels turned by the angle of their position.
#pragma once
#include "common/interface.h"

namespace megatron {
// The extents of x [length, batch, groups, heads, channels] and the strides of its first four dims, and of the tables.
struct RopeShape {
  int64_t length, batch, groups, heads, channels, rotated;
  int64_t length_stride, batch_stride, group_stride, head_stride;
  int64_t table_length_stride, table_batch_stride;
};
}  // namespace megatron

// Turns pairs (a, b) of the first `rotated` channels: a' = a cos - b sin, b' = b cos + a sin; further channels pass.
// Pair i is channels i and i + rotated / 2, or where interleaved 2i and 2i + 1. Inverse takes -sin, which undoes it and
// is the backward pass. cos and sin [length, batch, rotated / 2] are double for Float64, else float, and have strides
// of their own, 0 where one row is used for a whole dim. y is contiguous.
MEGATRON_API const char* megatron_rope(int64_t dtype, int64_t length, int64_t batch, int64_t groups, int64_t heads,
                                       int64_t channels, int64_t rotated, const void* x, int64_t length_stride,
                                       int64_t batch_stride, int64_t group_stride, int64_t head_stride,
                                       const void* cos, const void* sin, int64_t table_length_stride,
                                       int64_t table_batch_stride, int64_t interleaved, int64_t inverse, void* y,
                                       int64_t threads, void* stream);
