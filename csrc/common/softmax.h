// Softmax of attention scores [batch, heads, queries, keys] over the visible keys of each query.
//
// `window` is the number of keys visible to a query, its own and the preceding ones; the own key of the last query is
// the last key; 0: all keys. Other keys are not read. Scores, mask and gradients have strides for batch, head and
// query, which may be 0.
#pragma once
#include "common/interface.h"

// probs = exp(scale * scores - maximum) / sum over the visible keys whose byte in `mask`, if given, is 0; 0 for the
// other keys, and for rows without visible keys.
MEGATRON_API const char* megatron_attention_softmax(int64_t dtype, int64_t batch, int64_t heads, int64_t queries,
                                                    int64_t keys, const void* scores, int64_t scores_batch,
                                                    int64_t scores_head, int64_t scores_query, const void* mask,
                                                    int64_t mask_batch, int64_t mask_head, int64_t mask_query,
                                                    double scale, int64_t window, void* probs, int64_t threads,
                                                    void* stream);

// dscores = scale * probs * (dprobs - sum of dprobs * probs) over the visible keys, 0 for the others.
MEGATRON_API const char* megatron_attention_softmax_backward(int64_t dtype, int64_t batch, int64_t heads,
                                                             int64_t queries, int64_t keys, const void* dprobs,
                                                             int64_t dprobs_batch, int64_t dprobs_head,
                                                             int64_t dprobs_query, const void* probs, double scale,
                                                             int64_t window, void* dscores, int64_t threads,
                                                             void* stream);
