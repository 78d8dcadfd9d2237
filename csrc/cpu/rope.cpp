#include "common/rope.h"

#include "cpu/rows.h"

namespace megatron {
namespace {

// The even and the odd lanes of two adjacent vectors (vec.h has the inverse).
struct Evens { static constexpr int of(int i, int) { return 2 * i; } };
struct Odds { static constexpr int of(int i, int) { return 2 * i + 1; } };

// Number of lanes of the two vectors that n pairs fill.
MEGATRON_INLINE All lower(All, int) { return {}; }
MEGATRON_INLINE All upper(All, int) { return {}; }
MEGATRON_INLINE Some lower(Some pairs, int count) { return {std::min(2 * pairs.n, count)}; }
MEGATRON_INLINE Some upper(Some pairs, int count) { return {std::max(2 * pairs.n - count, 0)}; }

template <typename T>
void turn_halves(const T* x, const Wide<T>* cos, const Wide<T>* sin, Wide<T> sign, T* y, int64_t pairs) {
  for_row<T>(pairs, [=](int64_t i, auto n) {
    auto a = load(x + i, n), b = load(x + pairs + i, n), c = load(cos + i, n), s = sign * load(sin + i, n);
    store(y + i, a * c - b * s, n);
    store(y + pairs + i, b * c + a * s, n);
  });
}

template <typename T>
void turn_neighbours(const T* x, const Wide<T>* cos, const Wide<T>* sin, Wide<T> sign, T* y, int64_t pairs) {
  constexpr int kCount = kLanes<T>;
  for_row<T>(pairs, [=](int64_t i, auto n) {
    auto first = load(x + 2 * i, lower(n, kCount)), second = load(x + 2 * i + kCount, upper(n, kCount));
    auto a = picked<Evens>(first, second), b = picked<Odds>(first, second);
    auto c = load(cos + i, n), s = sign * load(sin + i, n);
    auto turned_a = a * c - b * s, turned_b = b * c + a * s;
    store(y + 2 * i, picked<Lower>(turned_a, turned_b), lower(n, kCount));
    store(y + 2 * i + kCount, picked<Upper>(turned_a, turned_b), upper(n, kCount));
  });
}

// All heads of one position of one sequence.
template <typename T>
void turn_heads(const RopeShape& shape, const T* x, const Wide<T>* cos, const Wide<T>* sin, Wide<T> sign,
                bool interleaved, T* y) {
  for (int64_t head = 0; head < shape.groups * shape.heads; ++head, y += shape.channels) {
    const T* from = x + head / shape.heads * shape.group_stride + head % shape.heads * shape.head_stride;
    if (interleaved) {
      turn_neighbours(from, cos, sin, sign, y, shape.rotated / 2);
    } else {
      turn_halves(from, cos, sin, sign, y, shape.rotated / 2);
    }
    std::memcpy(y + shape.rotated, from + shape.rotated, (shape.channels - shape.rotated) * sizeof(T));
  }
}

}  // namespace
}  // namespace megatron

using namespace megatron;

const char* megatron_rope(int64_t dtype, int64_t length, int64_t batch, int64_t groups, int64_t heads,
                          int64_t channels, int64_t rotated, const void* x, int64_t length_stride,
                          int64_t batch_stride, int64_t group_stride, int64_t head_stride, const void* cos,
                          const void* sin, int64_t table_length_stride, int64_t table_batch_stride,
                          int64_t interleaved, int64_t inverse, void* y, int64_t threads, void*) {
  const RopeShape shape{length, batch, groups, heads, channels, rotated, length_stride, batch_stride, group_stride,
                        head_stride, table_length_stride, table_batch_stride};
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    for_rows(length * batch, threads, [=](int64_t row) {
      const int64_t position = row / batch, sequence = row % batch;
      const int64_t table = position * table_length_stride + sequence * table_batch_stride;
      turn_heads(shape, at<T>(x, position * length_stride + sequence * batch_stride), at<Wide<T>>(cos, table),
                 at<Wide<T>>(sin, table), Wide<T>(inverse ? -1 : 1), interleaved != 0,
                 at<T>(y, row * groups * heads * channels));
    });
  });
}
