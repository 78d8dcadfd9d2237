// Dropout whose mask is a function of an element's coordinates, fused with the additions of a bias and a residual.
#pragma once
#include "common/interface.h"
#include "common/philox.h"

namespace megatron {

// A row of a tensor [length, batch, heads, columns], by its indices or by its global coordinates.
struct RowId { int64_t position, sample, head; };

// The distances between rows of a tensor, in elements.
struct Strides {
  int64_t position, sample, head;
  MEGATRON_BOTH int64_t at(RowId row) const { return row.position * position + row.sample * sample + row.head * head; }
};

// The mask of a tensor [length, batch, heads, columns]. The 16-bit halves of channels 8c ... 8c + 7 are
//
//     philox(counter = (c, position, sample mod 2^32, sample / 2^32 + 2^16 head), key),
//
// the lower 16 bits of each word first, with the position in the whole sequence, the global number of the sequence
// (below 2^48) and the global number of the head (0 without heads). The key is derived from the seed and the module's
// name. A channel whose half is below `threshold` is dropped. So the mask does not depend on how the tensor is split.
struct Mask {
  int64_t length, batch, heads;
  int64_t positions_stride;  // stride of position_ids between sequences
  int64_t first_head;
  uint64_t key;
  uint32_t threshold;  // the dropout probability times 2^16

  MEGATRON_BOTH int64_t rows() const { return length * batch * heads; }
  MEGATRON_BOTH RowId indices(int64_t row) const { return {row / heads / batch, row / heads % batch, row % heads}; }
};

// The counter of channels 8c ... 8c + 7 of a row, given by its global coordinates.
template <typename W> MEGATRON_BOTH Four<W> dropout_counter(W c, RowId row) {
  const uint64_t sample = static_cast<uint64_t>(row.sample), head = static_cast<uint64_t>(row.head);
  const W zero = c ^ c;
  return {{c, zero + static_cast<uint64_t>(row.position), zero + sample, zero + (sample >> 32 | head << 16)}};
}

// The 16 bits of channel c, from the words of its counter.
MEGATRON_BOTH uint32_t half_of(const Four<uint64_t>& words, int64_t c) {
  const uint64_t even = c & 4 ? words.of[2] : words.of[0], odd = c & 4 ? words.of[3] : words.of[1];
  return static_cast<uint32_t>(c & 2 ? odd : even) >> (c & 1 ? 16 : 0) & 0xffff;
}

}  // namespace megatron

// y = residual + keep * scale * (x + bias), with the mask above. x, residual and y are [length, batch, heads, columns]
// with the strides of their first three dims, bias is [columns]. The int64_t arrays are sample_index [batch], the
// global numbers of the sequences; position_ids [batch, length], the positions of the rows, with the stride of its
// first dim (0 if all sequences have the same); and channel_ids [columns], the global channels, which are attention's
// key positions. Null position_ids and channel_ids mean 0, 1, 2, ...; bias and residual may be null, and so may
// sample_index with threshold 0 (no dropout). Backward is the same function without bias and residual: dx from dy. If
// sums is not null, which is allowed only there, sums [columns] = sum of y over rows, which is dbias, by way of partial
// [num_partials, columns].
//
// kept is the mask, one bit per channel, with rows padded to a multiple of megatron_dropout_kept() channels: written if
// draws is 1, read if it is 0. It is null, with draws 0, if threshold or megatron_dropout_kept() is 0.
MEGATRON_API const char* megatron_dropout(int64_t dtype, int64_t length, int64_t batch, int64_t heads, int64_t columns,
                                          const void* x, int64_t x_position, int64_t x_sample, int64_t x_head,
                                          const void* bias, const void* residual, int64_t residual_position,
                                          int64_t residual_sample, int64_t residual_head, int64_t threshold,
                                          double scale, int64_t key, const void* sample_index, const void* position_ids,
                                          int64_t positions_stride, const void* channel_ids, int64_t first_head,
                                          void* kept, int64_t draws, void* y, int64_t y_position, int64_t y_sample,
                                          int64_t y_head, void* sums, void* partial, int64_t num_partials,
                                          int64_t threads, void* stream);

// Padding of the mask that a library saves in forward for backward, as above; 0: it does not. A CPU does, because
// computing the mask takes as long as the rest of the operation. A GPU, limited by memory bandwidth, computes it again.
MEGATRON_API int64_t megatron_dropout_kept();
