// The C interface of the CUDA library: softmax of attention scores.
#include "cuda/softmax.cuh"

#include "common/softmax.h"
#include "cuda/launch.cuh"

using namespace megatron;

// The largest blocks, and packs per thread (of two tensors in backward), for which nvcc finds registers without spills:
// rows of 32,768 16-bit numbers in forward, of 16,384 in backward; longer rows are read twice.
constexpr int kSoftmaxThreads = 1024, kSoftmaxHeld = 4, kSoftmaxBackwardHeld = 2;
constexpr double kLog2E = 1.4426950408889634;

const char* megatron_attention_softmax(int64_t dtype, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
                                       const void* scores, int64_t scores_batch, int64_t scores_head,
                                       int64_t scores_query, const void* mask, int64_t mask_batch, int64_t mask_head,
                                       int64_t mask_query, double scale, int64_t window, void* probs, int64_t,
                                       void* stream) {
  const Scores shape{batch, heads, queries, keys, window};
  const ScoreStrides by{scores_batch, scores_head, scores_query}, mask_by{mask_batch, mask_head, mask_query};
  const int64_t size = shape.rows() * keys;
  if (size == 0) return nullptr;
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    const bool packed = in_packs<T>({scores, probs}, {by.batch, by.head, by.query, keys}) &&
                        in_packs<uint8_t>({mask}, {mask_by.batch, mask_by.head, mask_by.query}, 16 / sizeof(T));
    return with_row<T, kSoftmaxThreads, kSoftmaxHeld>(keys, packed, [=](auto n, auto held, int threads) {
      auto kernel = softmax_kernel<T, decltype(n)::value, decltype(held)::value>;
      return LAUNCH(kernel, shape.rows(), threads, stream, shape, Array<T>(scores, shape.extent(by)), by,
                    Array<uint8_t>(mask, shape.extent(mask_by)), mask_by, static_cast<float>(scale * kLog2E),
                    Array<T>(probs, size));
    });
  });
}

const char* megatron_attention_softmax_backward(int64_t dtype, int64_t batch, int64_t heads, int64_t queries,
                                                int64_t keys, const void* dprobs, int64_t dprobs_batch,
                                                int64_t dprobs_head, int64_t dprobs_query, const void* probs,
                                                double scale, int64_t window, void* dscores, int64_t, void* stream) {
  const Scores shape{batch, heads, queries, keys, window};
  const ScoreStrides by{dprobs_batch, dprobs_head, dprobs_query};
  const int64_t size = shape.rows() * keys;
  if (size == 0) return nullptr;
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    const bool packed = in_packs<T>({dprobs, probs, dscores}, {by.batch, by.head, by.query, keys});
    return with_row<T, kSoftmaxThreads, kSoftmaxBackwardHeld>(keys, packed, [=](auto n, auto held, int threads) {
      auto kernel = softmax_backward_kernel<T, decltype(n)::value, decltype(held)::value>;
      return LAUNCH(kernel, shape.rows(), threads, stream, shape, Array<T>(dprobs, shape.extent(by)), by,
                    Array<T>(probs, size), static_cast<float>(scale), Array<T>(dscores, size));
    });
  });
}
