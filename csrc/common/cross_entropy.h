// Cross entropy of logits over a part of the vocabulary: the statistics of each rank's part, and the gradient.
//
// Column c is the token `first` + c; columns from `valid` on are padding and are ignored. `target` is int64 [rows],
// tokens of the whole vocabulary; z is a row of logits, z[target] the logit of its target.
#pragma once
#include "common/interface.h"

// parts [4, rows]: m = max(z), sum(exp(z - m)), z[target] (0 if it is not a valid column of this part), sum(z), over
// the valid columns; without valid columns -inf, 0, 0, 0. One pass over memory (Milakov and Gimelshein 2018).
MEGATRON_API const char* megatron_cross_entropy_parts(int64_t dtype, int64_t rows, int64_t valid, const void* logits,
                                                      int64_t logits_stride, const void* target, int64_t first,
                                                      void* parts, int64_t threads, void* stream);

// dlogits = dloss * (exp(z - m) / s - kept [target] - spread), 0 in the padding. statistics [2, rows] are m and the sum
// of exponentials s over the whole vocabulary. dlogits may be logits. `columns` are those of dlogits.
MEGATRON_API const char* megatron_cross_entropy_backward(int64_t dtype, int64_t rows, int64_t columns, int64_t valid,
                                                         const void* logits, int64_t logits_stride, const void* target,
                                                         int64_t first, const void* statistics, const void* dloss,
                                                         double kept, double spread, void* dlogits,
                                                         int64_t dlogits_stride, int64_t threads, void* stream);
