// Attention of single queries to keys and values in blocks, for generation.
//
// There is a query per row of `tables`, [rows, width], which has the numbers of the blocks with the row's positions. A
// row attends to its last `window` of lengths[row] positions, 0: to all. Query heads are divided equally among the
// `groups` of key and value heads. A key is at keys + position * key_position + group * key_group, where position =
// block * block_size + offset; values likewise. Positions after a row's length are not read.
#pragma once
#include "common/interface.h"

// out [rows, heads, value_channels] = sum of softmax(scale * query . key) * value over the positions of a row.
// `tables` and `lengths` are int64_t. Adjacent rows with the same blocks read them once.
MEGATRON_API const char* megatron_paged_attention(int64_t dtype, int64_t rows, int64_t heads, int64_t groups,
                                                  int64_t channels, int64_t value_channels, int64_t block_size,
                                                  const void* query, const void* keys, int64_t key_position,
                                                  int64_t key_group, const void* values, int64_t value_position,
                                                  int64_t value_group, const void* tables, int64_t width,
                                                  const void* lengths, int64_t window, double scale, void* out,
                                                  int64_t threads, void* stream);
