// Dropout whose mask is a function of what it falls on, with the additions of a bias before it and a residual after it.
#pragma once
#include "common/interface.h"
#include "common/philox.h"

namespace megatron {

// A row of a tensor [length, batch, heads, columns], by its indices or by its global numbers.
struct RowId { int64_t position, sample, head; };

// The distances between rows of a tensor, in elements.
struct Strides {
  int64_t position, sample, head;
  MEGATRON_BOTH int64_t at(RowId row) const { return row.position * position + row.sample * sample + row.head * head; }
};

// The mask of a tensor [length, batch, heads, columns]. Channels 8c ... 8c + 7 have the eight halves of
//
//     philox(counter = (c, position, sample mod 2^32, sample / 2^32 + 2^16 head), key),
//
// of each word the lower 16 bits first, with the position in the whole sequence, the global number of the sequence
// (below 2^48) and the global number of the head (0 where there are none); the key is that of the seed and the module's
// name. A channel whose half is below `threshold` is dropped. So nothing depends on how the tensor is cut.
struct Mask {
  int64_t length, batch, heads;
  int64_t positions_stride;  // of position_ids, from a sequence to the next
  int64_t first_head;
  uint64_t key;
  uint32_t threshold;  // the probability to drop, times 2^16

  MEGATRON_BOTH int64_t rows() const { return length * batch * heads; }
  MEGATRON_BOTH RowId indices(int64_t row) const { return {row / heads / batch, row / heads % batch, row % heads}; }
};

// The counter of channels 8c ... 8c + 7 of a row given by its global numbers.
template <typename W> MEGATRON_BOTH Four<W> dropout_counter(W c, RowId row) {
  const uint64_t sample = static_cast<uint64_t>(row.sample), head = static_cast<uint64_t>(row.head);
  const W zero = c ^ c;
  return {{c, zero + static_cast<uint64_t>(row.position), zero + sample, zero + (sample >> 32 | head << 16)}};
}

// The 16 bits of channel c, from the words that its counter gives.
MEGATRON_BOTH uint32_t half_of(const Four<uint64_t>& words, int64_t c) {
  const uint64_t even = c & 4 ? words.of[2] : words.of[0], odd = c & 4 ? words.of[3] : words.of[1];
  return static_cast<uint32_t>(c & 2 ? odd : even) >> (c & 1 ? 16 : 0) & 0xffff;
}

}  // namespace megatron

// y = residual + keep * scale * (x + bias), each row by the mask above; x, residual and y are [length, batch, heads,
// columns] with the strides of their first three dims, bias is [columns]. Of int64_t are sample_index [batch], the
// global numbers of the sequences, position_ids [batch, length] with the stride of its first dim (which is 0 if all
// sequences have the same), the positions of the rows, and channel_ids [columns], the global channels, which are
// attention's key positions. Null position_ids and channel_ids are 0, 1, 2, ...; bias and residual may be null, and so
// may sample_index with threshold 0, which drops nothing. Backward is the same function without bias and residual: dx of
// dy. Where sums is not null, as it may be there, sums [columns] = sum of y over rows, which is dbias, by way of partial
// [num_partials, columns].
//
// kept is the mask, a bit for each channel, its rows padded to a multiple of megatron_dropout_kept() channels: written
// where draws is 1, read where it is 0. It is null, with draws 0, where threshold or megatron_dropout_kept() is 0.
MEGATRON_API const char* megatron_dropout(int64_t dtype, int64_t length, int64_t batch, int64_t heads, int64_t columns,
                                          const void* x, int64_t x_position, int64_t x_sample, int64_t x_head,
                                          const void* bias, const void* residual, int64_t residual_position,
                                          int64_t residual_sample, int64_t residual_head, int64_t threshold,
                                          double scale, int64_t key, const void* sample_index, const void* position_ids,
                                          int64_t positions_stride, const void* channel_ids, int64_t first_head,
                                          void* kept, int64_t draws, void* y, int64_t y_position, int64_t y_sample,
                                          int64_t y_head, void* sums, void* partial, int64_t num_partials,
                                          int64_t threads, void* stream);

// Whether a library keeps the mask from forward for backward, as above. A CPU does, since drawing takes it as long as
// all the rest. A GPU, which waits for memory anyway, draws again.
MEGATRON_API int64_t megatron_dropout_kept();
