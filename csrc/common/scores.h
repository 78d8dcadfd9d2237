// Rows of attention scores [batch, heads, queries, keys]: where each lies, and which of its keys are visible.
#pragma once
#include <cstdint>

#include "common/both.h"

namespace megatron {

// Elements between neighbours in each of the first three dims, 0 where one is broadcast; keys follow one another.
struct ScoreStrides { int64_t batch, head, query; };

struct Scores {
  int64_t batch, heads, queries, keys;
  int64_t window;  // how many keys a query sees, the last of which is its own; 0: all keys, before and after it

  int64_t rows() const { return batch * heads * queries; }
  // The elements from the first row's first to the last row's last.
  int64_t extent(ScoreStrides by) const {
    return (batch - 1) * by.batch + (heads - 1) * by.head + (queries - 1) * by.query + keys;
  }
};

struct ScoreRow {
  int64_t batch, head, query;
  int64_t first, last;  // the visible keys are [first, last): the last query's own is the last key

  // Divides in the precision of `number`: GPUs have instructions for 32 bits only, of which 64 take a long row of them.
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
