// Common parts of rowwise operations: distribution of rows over threads, and sums over rows.
#pragma once
#include <algorithm>

#include "cpu/vec.h"
#include "cpu/parallel.h"

namespace megatron {

// The element at `offset`; null for an absent tensor.
template <typename T> const T* at(const void* p, int64_t offset = 0) {
  return p ? static_cast<const T*>(p) + offset : nullptr;
}
template <typename T> T* at(void* p, int64_t offset = 0) { return p ? static_cast<T*>(p) + offset : nullptr; }

// Calls work(data, first, last, own) for the rows [first, last) of each part; `own` is its part of `partial`, `bytes`
// long and zeroed. Not a template, so that it is compiled once.
inline void for_parts(int64_t rows, int64_t parts, int64_t threads, void* partial, int64_t bytes,
                      void (*work)(const void* data, int64_t first, int64_t last, void* own), const void* data) {
  parallel_for(parts, threads, [=](int64_t part) {
    char* own = static_cast<char*>(partial) + part * bytes;
    if (bytes) std::memset(own, 0, bytes);
    work(data, part * rows / parts, (part + 1) * rows / parts, own);
  });
}

// Calls work(row) for every row, in several parts per thread, so that slow threads get fewer rows.
template <typename F> void for_rows(int64_t rows, int64_t threads, const F& work) {
  auto part = [](const void* data, int64_t row, int64_t last, void*) {
    for (; row < last; ++row) (*static_cast<const F*>(data))(row);
  };
  for_parts(rows, std::min(rows, threads == 1 ? 1 : 4 * threads), threads, nullptr, 0, part, &work);
}

// Calls work(row, partial_row) for every row. Rows are divided into num_partials parts for any number of threads, so
// that the sums do not depend on it; each part has a zeroed row of `width` in `partial`.
template <typename A, typename F>
void for_rows_with_partials(int64_t rows, int64_t threads, A* partial, int64_t num_partials, int64_t width,
                            const F& work) {
  auto part = [](const void* data, int64_t row, int64_t last, void* own) {
    for (; row < last; ++row) (*static_cast<const F*>(data))(row, static_cast<A*>(own));
  };
  for_parts(rows, num_partials, threads, partial, width * sizeof(A), part, &work);
}

// total[i] = sum over parts (at least one) of partial[part * width + i], in the order of the parts.
template <typename T>
void sum_partials(const Wide<T>* partial, int64_t num_partials, int64_t width, T* total, int64_t columns,
                  int64_t threads) {
  constexpr int64_t kColumns = 256;  // per task
  parallel_for((columns + kColumns - 1) / kColumns, threads, [=](int64_t task) {
    const int64_t first = task * kColumns;
    for_row<T>(std::min(kColumns, columns - first), [=](int64_t i, auto n) {
      auto sum = load(partial + first + i, n);
      for (int64_t part = 1; part < num_partials; ++part) sum += load(partial + part * width + first + i, n);
      store(total + first + i, sum, n);
    });
  });
}

}  // namespace megatron
