#include "common/paged_attention.h"

#include <vector>

#include "cpu/rows.h"
#include "cpu/vec_math.h"

namespace megatron {
namespace {

// Rows of a task: a block that they share is read from memory once, and from the cache by the others.
constexpr int64_t kTaskRows = 16;

struct PagedShape {
  int64_t rows, heads, groups, channels, value_channels, block_size, key_position, key_group, value_position,
      value_group, width, window;
  int64_t queries() const { return heads / groups; }  // of a group
};

// scores[k] = query . key k for kQueries queries; `n` lanes of four keys at a time, so that each loaded vector serves
// several sums, and these do not wait for each other.
template <typename T, int kQueries, int kKeys>
MEGATRON_INLINE void products(const Wide<T>* query, const T* keys, int64_t stride, int64_t channels,
                              Wide<T>* scores, int64_t score_stride) {
  Vec<T> sums[kQueries][kKeys] = {};
  for_row<T>(channels, [&](int64_t i, auto n) {
    Vec<T> own[kQueries];
    for (int q = 0; q < kQueries; ++q) own[q] = load(query + q * channels + i, n);
    for (int k = 0; k < kKeys; ++k) {
      const Vec<T> key = load(keys + k * stride + i, n);
      for (int q = 0; q < kQueries; ++q) sums[q][k] += own[q] * key;
    }
  });
  for (int q = 0; q < kQueries; ++q) {
    for (int k = 0; k < kKeys; ++k) scores[q * score_stride + k] = sum_lanes<Wide<T>>(sums[q][k]);
  }
}

// out = shrink * out + sum over k of weights[k] * values[k] for kVectors vectors with `n` lanes, in registers.
template <typename T, int kQueries, int kVectors, typename N>
MEGATRON_INLINE void add_vectors(const Wide<T>* weights, int64_t weight_stride, const T* values, int64_t stride,
                                 int64_t count, const Wide<T>* shrink, Wide<T>* out, int64_t out_stride, N n) {
  Vec<T> sums[kQueries][kVectors];
  for (int q = 0; q < kQueries; ++q) {
    for (int at = 0; at < kVectors; ++at) sums[q][at] = load(out + q * out_stride + at * kLanes<T>, n) * shrink[q];
  }
  for (int64_t k = 0; k < count; ++k, values += stride) {
    for (int at = 0; at < kVectors; ++at) {
      const Vec<T> value = load(values + at * kLanes<T>, n);
      for (int q = 0; q < kQueries; ++q) sums[q][at] += weights[q * weight_stride + k] * value;
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    for (int at = 0; at < kVectors; ++at) store(out + q * out_stride + at * kLanes<T>, sums[q][at], n);
  }
}

// The softmax over the positions so far (Milakov and Gimelshein 2018): maximum of the scores, sum of exponentials.
template <typename A> struct Softmax { A top, sum; };

// Adds `count` positions to kQueries queries.
template <typename T, int kQueries>
void add_positions(const PagedShape& shape, const Wide<T>* query, const T* keys, const T* values, int64_t count,
                   Wide<T>* scores, Softmax<Wide<T>>* so_far, Wide<T>* out) {
  using A = Wide<T>;
  const int64_t stride = shape.block_size, channels = shape.value_channels;
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) {
    products<T, kQueries, 4>(query, keys + k * shape.key_position, shape.key_position, shape.channels, scores + k,
                             stride);
  }
  for (; k < count; ++k) {
    products<T, kQueries, 1>(query, keys + k * shape.key_position, shape.key_position, shape.channels, scores + k,
                             stride);
  }
  A shrink[kQueries];
  for (int q = 0; q < kQueries; ++q) {
    A* own = scores + q * stride;
    const A highest = max_row<A>(count, [=](int64_t i, auto n) { return load(own + i, n); });
    const A top = highest > so_far[q].top ? highest : so_far[q].top;
    auto sums = sum_row<A, 1>(count, [=](int64_t i, auto n, Vec<A>* sums) {
      auto e = vec_exp(load(own + i, n) - top);
      store(own + i, e, n);
      sums[0] += only(e, n);
    });
    shrink[q] = so_far[q].sum == 0 ? A(0) : std::exp(so_far[q].top - top);
    so_far[q] = {top, so_far[q].sum * shrink[q] + sums.of[0]};
  }
  constexpr int kVectors = 8 / kQueries, kStep = kLanes<T>;
  int64_t i = 0;
  for (; i + kVectors * kStep <= channels; i += kVectors * kStep) {
    add_vectors<T, kQueries, kVectors>(scores, stride, values + i, shape.value_position, count, shrink, out + i,
                                       channels, All{});
  }
  for_row<T>(channels - i, [&](int64_t at, auto n) {
    add_vectors<T, kQueries, 1>(scores, stride, values + i + at, shape.value_position, count, shrink, out + i + at,
                                channels, n);
  });
}

// Attention of the rows [first, last) to one group of keys and values, block by block.
template <typename T>
void attend_rows(const PagedShape& shape, int64_t first, int64_t last, int64_t group, const T* query, const T* keys,
                 const T* values, const int64_t* tables, const int64_t* lengths, Wide<T> scale, T* out) {
  using A = Wide<T>;
  const int64_t queries = shape.queries(), count = (last - first) * queries;
  std::vector<A> scaled(count * shape.channels), sums(count * shape.value_channels), scores(2 * shape.block_size);
  std::vector<Softmax<A>> softmax(count, Softmax<A>{-static_cast<A>(INFINITY), 0});
  int64_t longest = 0;
  for (int64_t row = first; row < last; ++row) {
    longest = std::max(longest, lengths[row]);
    const T* from = query + (row * shape.heads + group * queries) * shape.channels;
    A* to = scaled.data() + (row - first) * queries * shape.channels;
    for_row<T>(queries * shape.channels, [=](int64_t i, auto n) { store(to + i, load(from + i, n) * scale, n); });
  }
  for (int64_t index = 0; index * shape.block_size < longest; ++index) {
    const int64_t begin = index * shape.block_size;
    auto low = [&](int64_t row) {
      return shape.window ? std::max<int64_t>(lengths[row] - shape.window - begin, 0) : int64_t(0);
    };
    auto high = [&](int64_t row) { return std::min(lengths[row] - begin, shape.block_size); };
    for (int64_t row = first, end; row < last; row = end) {
      // The rows up to `end` attend to the same positions of the same block.
      const int64_t* block = tables + row * shape.width + index;
      auto same = [&](int64_t other) {
        return high(other) == high(row) && low(other) == low(row) && tables[other * shape.width + index] == *block;
      };
      for (end = row + 1; end < last && same(end);) ++end;
      if (low(row) >= high(row)) continue;
      const int64_t position = *block * shape.block_size + low(row), length = high(row) - low(row);
      const T* key = keys + position * shape.key_position + group * shape.key_group;
      const T* value = values + position * shape.value_position + group * shape.value_group;
      int64_t at = (row - first) * queries;
      const int64_t stop = (end - first) * queries;
      for (; at + 2 <= stop; at += 2) {
        add_positions<T, 2>(shape, scaled.data() + at * shape.channels, key, value, length, scores.data(),
                            softmax.data() + at, sums.data() + at * shape.value_channels);
      }
      if (at < stop) {
        add_positions<T, 1>(shape, scaled.data() + at * shape.channels, key, value, length, scores.data(),
                            softmax.data() + at, sums.data() + at * shape.value_channels);
      }
    }
  }
  for (int64_t at = 0; at < count; ++at) {
    const A factor = 1 / softmax[at].sum;
    const A* from = sums.data() + at * shape.value_channels;
    T* to = out + ((first + at / queries) * shape.heads + group * queries + at % queries) * shape.value_channels;
    for_row<T>(shape.value_channels, [=](int64_t i, auto n) { store(to + i, load(from + i, n) * factor, n); });
  }
}

}  // namespace
}  // namespace megatron

using namespace megatron;

const char* megatron_paged_attention(int64_t dtype, int64_t rows, int64_t heads, int64_t groups, int64_t channels,
                                     int64_t value_channels, int64_t block_size, const void* query, const void* keys,
                                     int64_t key_position, int64_t key_group, const void* values,
                                     int64_t value_position, int64_t value_group, const void* tables, int64_t width,
                                     const void* lengths, int64_t window, double scale, void* out, int64_t threads,
                                     void*) {
  const PagedShape shape{rows, heads, groups, channels, value_channels, block_size, key_position, key_group,
                         value_position, value_group, width, window};
  const int64_t tasks = (rows + kTaskRows - 1) / kTaskRows;
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    for_rows(tasks * groups, threads, [=](int64_t task) {
      const int64_t first = task / groups * kTaskRows;
      attend_rows<T>(shape, first, std::min(first + kTaskRows, rows), task % groups, at<T>(query), at<T>(keys),
                     at<T>(values), at<int64_t>(tables), at<int64_t>(lengths), static_cast<Wide<T>>(scale),
                     at<T>(out));
    });
  });
}
