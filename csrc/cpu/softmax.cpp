#include "common/softmax.h"

#include <vector>

#include "common/scores.h"
#include "cpu/rows.h"
#include "cpu/vec_math.h"

namespace megatron {
namespace {

typedef uint8_t FloatMask __attribute__((vector_size(kFloats)));
typedef uint8_t DoubleMask __attribute__((vector_size(kLanes<double>)));

// v, and `other` in the lanes hidden by the mask; null hides nothing.
template <typename N> MEGATRON_INLINE FloatVec unless(const uint8_t* mask, int64_t i, N n, FloatVec v, float other) {
  if (!mask) return v;
  FloatMask bytes = raw_load<FloatMask>(mask + i, n);
  Bits hidden = __builtin_convertvector(bytes, Bits);
  return hidden != 0 ? FloatVec{} + other : v;
}
template <typename N> MEGATRON_INLINE DoubleVec unless(const uint8_t* mask, int64_t i, N n, DoubleVec v, double other) {
  if (!mask) return v;
  DoubleMask bytes = raw_load<DoubleMask>(mask + i, n);
  for (int lane = 0; lane < kLanes<double>; ++lane) v[lane] = bytes[lane] ? other : v[lane];
  return v;
}

// Memory of a row's exponentials until their sum is known: the output, or a buffer of the thread if the output is
// narrower. Rounding them first would lose accuracy; computing them twice takes 1.7 times as long.
template <typename T> Wide<T>* room_for_exponentials(T* y, int64_t columns) {
  if constexpr (std::is_same_v<T, Wide<T>>) {
    return y;
  } else {
    thread_local std::vector<Wide<T>> memory;
    if (memory.size() < size_t(columns)) memory.resize(columns);
    return memory.data();
  }
}

template <typename T> void clear(T* p, int64_t count) { std::memset(static_cast<void*>(p), 0, count * sizeof(T)); }

// Without a visible key the maximum is -infinity and no exponential is added; if all visible scores are -infinity, the
// exponentials are NaN, and so is the result.
template <typename T>
void forward_row(const T* x, const uint8_t* mask, Wide<T> scale, T* y, int64_t columns) {
  const Wide<T> hidden = -static_cast<Wide<T>>(INFINITY);
  const Wide<T> top =
      max_row<T>(columns, [=](int64_t i, auto n) { return unless(mask, i, n, load(x + i, n) * scale, hidden); });
  Wide<T>* exponentials = room_for_exponentials(y, columns);
  auto sums = sum_row<T, 1>(columns, [=](int64_t i, auto n, Vec<T>* sums) {
    auto e = unless(mask, i, n, vec_exp(load(x + i, n) * scale - top), Wide<T>(0));
    store(exponentials + i, e, n);
    sums[0] += only(e, n);
  });
  const Wide<T> factor = top == hidden ? 0 : 1 / sums.of[0];
  for_row<T>(columns, [=](int64_t i, auto n) { store(y + i, load(exponentials + i, n) * factor, n); });
}

template <typename T>
void backward_row(const T* dy, const T* y, Wide<T> scale, T* dx, int64_t columns) {
  auto products = sum_row<T, 1>(
      columns, [=](int64_t i, auto n, auto* sums) { sums[0] += load(dy + i, n) * load(y + i, n); });
  const Wide<T> mean = products.of[0];
  for_row<T>(columns, [=](int64_t i, auto n) {
    store(dx + i, (load(dy + i, n) - mean) * (load(y + i, n) * scale), n);
  });
}

// Calls work(row, begin) for every row with the offset `begin` of its visible keys in `out`, and writes zeros for the
// other keys.
template <typename T, typename F> void for_score_rows(const Scores& shape, int64_t threads, T* out, F work) {
  for_rows(shape.rows(), threads, [=](int64_t number) {
    const ScoreRow row(shape, number);
    T* begin = out + number * shape.keys;
    clear(begin, row.first);
    clear(begin + row.last, shape.keys - row.last);
    work(row, number * shape.keys + row.first);
  });
}

}  // namespace
}  // namespace megatron

using namespace megatron;

const char* megatron_attention_softmax(int64_t dtype, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
                                       const void* scores, int64_t scores_batch, int64_t scores_head,
                                       int64_t scores_query, const void* mask, int64_t mask_batch, int64_t mask_head,
                                       int64_t mask_query, double scale, int64_t window, void* probs, int64_t threads,
                                       void*) {
  const Scores shape{batch, heads, queries, keys, window};
  const ScoreStrides by{scores_batch, scores_head, scores_query}, mask_by{mask_batch, mask_head, mask_query};
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    for_score_rows(shape, threads, at<T>(probs), [=](const ScoreRow& row, int64_t begin) {
      forward_row(at<T>(scores, row.begin(by) + row.first), at<uint8_t>(mask, row.begin(mask_by) + row.first),
                  static_cast<Wide<T>>(scale), at<T>(probs, begin), row.last - row.first);
    });
  });
}

const char* megatron_attention_softmax_backward(int64_t dtype, int64_t batch, int64_t heads, int64_t queries,
                                                int64_t keys, const void* dprobs, int64_t dprobs_batch,
                                                int64_t dprobs_head, int64_t dprobs_query, const void* probs,
                                                double scale, int64_t window, void* dscores, int64_t threads, void*) {
  const Scores shape{batch, heads, queries, keys, window};
  const ScoreStrides by{dprobs_batch, dprobs_head, dprobs_query};
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    for_score_rows(shape, threads, at<T>(dscores), [=](const ScoreRow& row, int64_t begin) {
      backward_row(at<T>(dprobs, row.begin(by) + row.first), at<T>(probs, begin),
                   static_cast<Wide<T>>(scale), at<T>(dscores, begin), row.last - row.first);
    });
  });
}
