// Causal attention of queries to keys and values of the same positions, as in training.
//
// `shape` has batch, heads, groups, length, channels. Query heads are divided equally among the `groups` of key and value
// heads. `strides` has the distances between positions, samples and heads, in this order, of the tensors named below;
// channels are contiguous, and their number is a multiple of 8. `statistics` [batch, heads, 2, length] has each query's
// largest score m, and 1 / the sum of exp(score - m). The logarithm of the sum of exp(score), in one number, would lose
// the second part for large scores.
#pragma once
#include "common/interface.h"

// out = softmax(scale * query . key) * value over the keys up to the query's position. `strides`: query, key, value, out.
MEGATRON_API const char* megatron_causal_attention(int64_t dtype, const void* shape, const void* strides,
                                                   const void* query, const void* key, const void* value, double scale,
                                                   void* out, void* statistics, int64_t threads, void* stream);

// The gradients of query, key and value. `strides`: query, key, value, out, dout, dquery, dkey, dvalue.
MEGATRON_API const char* megatron_causal_attention_backward(int64_t dtype, const void* shape, const void* strides,
                                                            const void* query, const void* key, const void* value,
                                                            const void* out, const void* dout, const void* statistics,
                                                            double scale, void* dquery, void* dkey, void* dvalue,
                                                            int64_t threads, void* stream);
