// Rotary positions: rotate pairs of channels by the angle of their position.
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

// Rotates pairs (a, b) of the first `rotated` channels: a' = a cos - b sin, b' = b cos + a sin; other channels are
// copied. Pair i is channels i and i + rotated / 2, or if interleaved 2i and 2i + 1. Inverse uses -sin, which is the
// inverse rotation and the backward pass. cos and sin [length, batch, rotated / 2] are double for Float64, else float,
// and have their own strides, 0 if a row is broadcast over a dim. y is contiguous.
MEGATRON_API const char* megatron_rope(int64_t dtype, int64_t length, int64_t batch, int64_t groups, int64_t heads,
                                       int64_t channels, int64_t rotated, const void* x, int64_t length_stride,
                                       int64_t batch_stride, int64_t group_stride, int64_t head_stride,
                                       const void* cos, const void* sin, int64_t table_length_stride,
                                       int64_t table_batch_stride, int64_t interleaved, int64_t inverse, void* y,
                                       int64_t threads, void* stream);
