// Dropout whose mask is a function of what it falls on, with the additions of a bias before it and a residual after it.
#pragma once
#include "common/interface.h"
#include "common/philox.h"

namespace megatron {

// What a row belongs to: row `position` of sequence `sample`, and in attention weights of head `head`, each counted
// from 0 in the tensor.
struct Place { int64_t position, sample, head; };

// The distances between places of a tensor, in elements.
struct Strides {
  int64_t position, sample, head;
  MEGATRON_BOTH int64_t at(Place place) const {
    return place.position * position + place.sample * sample + place.head * head;
  }
};

// The mask of a tensor [length, batch, heads, columns]. Channels 8c ... 8c + 7 have the eight halves of
//
//     philox(counter = (c, position, sample mod 2^32, sample / 2^32 + 2^16 head), key),
//
// of each word the lower 16 bits first, with the position in the whole sequence, the global number of the sequence
// (below 2^48) and the global number of the head (0 where there are none); the key is that of the seed and the place in
// the model. A channel whose half is below `threshold` is dropped. So nothing depends on how the tensor is cut.
struct Mask {
  int64_t length, batch, heads;
  int64_t first_position, first_head;  // of this part of the tensor
  uint64_t key;
  uint32_t threshold;  // the probability to drop, times 2^16

  MEGATRON_BOTH int64_t rows() const { return length * batch * heads; }
  MEGATRON_BOTH Place place(int64_t row) const {
    return {row / heads / batch, row / heads % batch, row % heads};
  }
  template <typename W> MEGATRON_BOTH Four<W> counter(W c, Place place, int64_t sample) const {
    const uint64_t number = static_cast<uint64_t>(sample), head = static_cast<uint64_t>(first_head + place.head);
    const W zero = c ^ c;
    return {{c, zero + static_cast<uint64_t>(first_position + place.position), zero + number,
             zero + (number >> 32 | head << 16)}};
  }
};

}  // namespace megatron

// y = residual + keep * scale * (x + bias), each row by the mask above; x, residual and y are [length, batch, heads,
// columns] with the strides of their first three dims, bias is [columns], sample_index [batch] of int64_t has the
// global numbers of the sequences. bias and residual may be null, and so may sample_index with threshold 0, which drops
// nothing. Backward is the same function, without bias and residual: dx of dy. Where sums is not null, as it may be
// there, sums [columns] = sum of y over rows, which is dbias, by way of partial [num_partials, columns].
//
// kept is the mask, a bit for each channel, its rows padded to a multiple of megatron_dropout_kept() channels: written
// where draws is 1, read where it is 0. It is null, with draws 0, where threshold or megatron_dropout_kept() is 0.
MEGATRON_API const char* megatron_dropout(int64_t dtype, int64_t length, int64_t batch, int64_t heads, int64_t columns,
                                          const void* x, int64_t x_position, int64_t x_sample, int64_t x_head,
                                          const void* bias, const void* residual, int64_t residual_position,
                                          int64_t residual_sample, int64_t residual_head, int64_t threshold,
                                          double scale, int64_t key, const void* sample_index, int64_t first_position,
                                          int64_t first_head, void* kept, int64_t draws, void* y, int64_t y_position,
                                          int64_t y_sample, int64_t y_head, void* sums, void* partial,
                                          int64_t num_partials, int64_t threads, void* stream);

// Whether a library keeps the mask from forward for backward, as above. A CPU does, since drawing takes it as long as
// all the rest. A GPU, which waits for memory anyway, draws again.
MEGATRON_API int64_t megatron_dropout_kept();
