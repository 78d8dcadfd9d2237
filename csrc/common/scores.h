// Rows of attention scores [batch, heads, queries, keys]: their offsets and visible keys.
#pragma once
#include <cstdint>

#include "common/both.h"

namespace megatron {

// Strides of the first three dims in elements, 0 for a broadcast dim; keys are contiguous.
struct ScoreStrides { int64_t batch, head, query; };

struct Scores {
  int64_t batch, heads, queries, keys;
  int64_t window;  // number of keys visible to a query, its own included as the last; 0: all keys, before and after it

  int64_t rows() const { return batch * heads * queries; }
  // The elements from the beginning of the first row to the end of the last row.
  int64_t extent(ScoreStrides by) const {
    return (batch - 1) * by.batch + (heads - 1) * by.head + (queries - 1) * by.query + keys;
  }
};

struct ScoreRow {
  int64_t batch, head, query;
  int64_t first, last;  // the visible keys are [first, last); the own key of the last query is the last key

  // Divides in the precision of `number`: GPUs have only 32-bit division; 64 bits take a long sequence of instructions.
  template <typename I> MEGATRON_BOTH ScoreRow(const Scores& of, I number) {
    const I in_head = number / static_cast<I>(of.queries);
    query = number % static_cast<I>(of.queries);
    head = in_head % static_cast<I>(of.heads);
    batch = in_head / static_cast<I>(of.heads);
    const int64_t end = of.window ? query + 1 + of.keys - of.queries : of.keys;
    const int64_t begin = of.window ? end - of.window : 0;
    last = end > 0 ? end : 0;
    first = begin > 0 ? begin : 0;
  }
  MEGATRON_BOTH int64_t begin(ScoreStrides by) const { return batch * by.batch + head * by.head + query * by.query; }
};

}  // namespace megatron
