// What the row-wise operations share: how rows go to threads, the residual, and sums over rows.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "cpu/pairs.h"
#include "cpu/parallel.h"

namespace megatron {

// The element at `offset`; null where there is no tensor.
template <typename T> const T* at(const void* p, int64_t offset = 0) {
  return p ? static_cast<const T*>(p) + offset : nullptr;
}
template <typename T> T* at(void* p, int64_t offset = 0) { return p ? static_cast<T*>(p) + offset : nullptr; }

// Calls work(data, first, last, own) for the rows from `first` to before `last` of each part; `own` are its `bytes` of
// `partial`, zeroed. One function for all: as a part of the templates below it would be compiled a hundred times.
inline void for_parts(int64_t rows, int64_t parts, int64_t threads, void* partial, int64_t bytes,
                      void (*work)(const void* data, int64_t first, int64_t last, void* own), const void* data) {
  parallel_for(parts, threads, [=](int64_t part) {
    char* own = static_cast<char*>(partial) + part * bytes;
    if (bytes) std::memset(own, 0, bytes);
    work(data, part * rows / parts, (part + 1) * rows / parts, own);
    end_streams();
  });
}

// Calls work(row) for every row, in a few times as many parts as threads, so that who is late has less to do.
template <typename F> void for_rows(int64_t rows, int64_t threads, const F& work) {
  auto part = [](const void* data, int64_t row, int64_t last, void*) {
    for (; row < last; ++row) (*static_cast<const F*>(data))(row);
  };
  for_parts(rows, std::min(rows, threads == 1 ? 1 : 4 * threads), threads, nullptr, 0, part, &work);
}

// Calls f(std::true_type()) where `out` [rows, columns] is to be written with put<true>: a result of 4 MiB is not in
// the cache any more when it is read, and LayerNorm of 2048 x 1024 in float32 then takes three quarters of the time,
// of 512 x 4096 three fifths. Else f(std::false_type()).
template <typename T, typename F> void with_streams(const void* out, int64_t rows, int64_t columns, F f) {
  constexpr int64_t kLarge = 4 << 20, kVector = (kPairs<T> ? 2 : 1) * kLanes<T> * sizeof(T);
  const int64_t bytes = columns * int64_t(sizeof(T));
  // The other types are too rare for code of their own.
  if constexpr (kStreams && (std::is_same_v<T, float> || std::is_same_v<T, bf16>)) {
    const bool whole_vectors = (reinterpret_cast<uintptr_t>(out) | static_cast<uintptr_t>(bytes)) % kVector == 0;
    if (whole_vectors && rows * bytes >= kLarge) return f(std::true_type());
  }
  f(std::false_type());
}

// The lanes at `i` of the row that is normalised: of x, or of x + residual in x's precision, which goes to `sum`.
template <typename T, typename N>
MEGATRON_INLINE auto with_residual(const T* x, const T* residual, T* sum, int64_t i, N n) {
  if (!residual) return load(x + i, n);
  store(sum + i, load(x + i, n) + load(residual + i, n), n);
  return load(sum + i, n);
}

// A row that the thread keeps, for sums that are written past the cache once they have been read often enough.
template <typename T> T* own_row(int64_t columns) {
  thread_local std::vector<T> row;
  if (row.size() < size_t(columns)) row.resize(columns);
  return row.data();
}

// Whether a backward pass fetches the next row ahead. On rows of 8 KiB that saves up to two fifths of the time; rows of
// 4 KiB of three tensors the processor fetches better by itself.
template <typename T> bool fetches_ahead(const T* dsum, int64_t columns) {
  return !dsum || columns * int64_t(sizeof(T)) > 4096;
}

// Calls work(row, partial_row) for every row. The rows are dealt to num_partials parts, whatever the number of
// threads, so that the sums do not depend on it; each part has its own zeroed row of `width` in `partial`.
template <typename A, typename F>
void for_rows_with_partials(int64_t rows, int64_t threads, A* partial, int64_t num_partials, int64_t width,
                            const F& work) {
  auto part = [](const void* data, int64_t row, int64_t last, void* own) {
    for (; row < last; ++row) (*static_cast<const F*>(data))(row, static_cast<A*>(own));
  };
  for_parts(rows, num_partials, threads, partial, width * sizeof(A), part, &work);
}

// total[i] = sum over parts of partial[part * width + i], at least one, which loops over these columns added up.
template <typename T>
void sum_partials(const Wide<T>* partial, int64_t num_partials, int64_t width, T* total, int64_t columns,
                  int64_t threads) {
  constexpr int64_t kColumns = 256;  // of each task, in whole pairs of vectors
  parallel_for((columns + kColumns - 1) / kColumns, threads, [=](int64_t task) {
    const int64_t first = task * kColumns;
    for_row_in_pairs<T>(std::min(kColumns, columns - first), [=](int64_t i, auto n) {
      auto sum = sums_at(partial + first + i, n);
      for (int64_t part = 1; part < num_partials; ++part) sum += sums_at(partial + part * width + first + i, n);
      store(total + first + i, sum, n);
    });
  });
}

}  // namespace megatron
