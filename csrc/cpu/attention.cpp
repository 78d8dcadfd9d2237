#include "common/attention.h"

#include <memory>

#include "cpu/rows.h"
#include "cpu/vec_math.h"

namespace megatron {
namespace {

// Blocks of the scores: with kQueries x kKeys numbers they stay in the first or second cache. 48 is a multiple of the
// rows of a tile.
constexpr int64_t kQueries = 48, kKeys = 128;
constexpr int kRows = 6, kColumns = 2 * kFloats;  // of a tile, whose sums fit in the registers

struct Attention {
  int64_t batch, heads, groups, length, channels;
  float scale;
  int64_t padded() const { return (length + kKeys - 1) / kKeys * kKeys; }
};

// Tasks of several threads: the query heads of each sample and group, in `parts` if there are fewer pairs than threads.
struct HeadTasks {
  int64_t groups, heads, parts, count;
  HeadTasks(const Attention& of, int64_t threads) : groups(of.groups), heads(of.heads / of.groups) {
    const int64_t pairs = of.batch * of.groups;
    parts = pairs ? std::clamp<int64_t>((threads + pairs - 1) / pairs, 1, heads) : 1;
    count = pairs * parts;
  }
};

struct HeadTask {
  int64_t batch, group, first, last;  // query heads [first, last)
  HeadTask(const HeadTasks& all, int64_t number) {
    const int64_t pair = number / all.parts, part = number % all.parts;
    batch = pair / all.groups, group = pair % all.groups;
    first = group * all.heads + all.heads * part / all.parts;
    last = group * all.heads + all.heads * (part + 1) / all.parts;
  }
};

struct HeadStrides {
  int64_t position, sample, head;
  int64_t of(int64_t b, int64_t h) const { return b * sample + h * head; }
};

// One head's rows [length, channels] at a constant stride.
struct Rows {
  const float* data;
  int64_t stride;
  const float* operator[](int64_t row) const { return data + row * stride; }
};

// Eight floats, of which the number of channels is a multiple.
typedef float Eight __attribute__((vector_size(32)));

// A tile: c[i][j] (+)= sum over k of a[i * row + k * step] * b[k][j] for kI rows and kV vectors V;
// count > 0.
template <int kI, int kV, bool kAdds, typename V>
MEGATRON_INLINE void tile(const float* a, int64_t row, int64_t step, const float* b, int64_t b_stride, int64_t count,
                          float* c, int64_t c_stride) {
  constexpr int kLanes = sizeof(V) / sizeof(float);
  V sums[kI][kV];
  for (int i = 0; i < kI; ++i) {
    for (int v = 0; v < kV; ++v) sums[i][v] = V{};
  }
  do {  // at least once: otherwise compilers keep the sums in memory
    V right[kV];
    for (int v = 0; v < kV; ++v) right[v] = raw_load<V>(b + v * kLanes, All{});
    for (int i = 0; i < kI; ++i) {
      for (int v = 0; v < kV; ++v) sums[i][v] += a[i * row] * right[v];
    }
    a += step, b += b_stride;
  } while (--count > 0);
  for (int i = 0; i < kI; ++i) {
    for (int v = 0; v < kV; ++v) {
      float* to = c + i * c_stride + v * kLanes;
      raw_store(to, kAdds ? raw_load<V>(to, All{}) + sums[i][v] : sums[i][v], All{});
    }
  }
}

// The same for 1 to kRows rows.
template <int kV, bool kAdds, typename V, int kI = kRows>
MEGATRON_INLINE void tile_of(int64_t rows, const float* a, int64_t row, int64_t step, const float* b, int64_t b_stride,
                             int64_t count, float* c, int64_t c_stride) {
  if constexpr (kI > 1) {
    if (rows < kI) return tile_of<kV, kAdds, V, kI - 1>(rows, a, row, step, b, b_stride, count, c, c_stride);
  }
  tile<kI, kV, kAdds, V>(a, row, step, b, b_stride, count, c, c_stride);
}

// A row of tiles, of `columns` (a multiple of eight).
template <bool kAdds>
void tiles(int64_t rows, const float* a, int64_t row, int64_t step, const float* b, int64_t b_stride, int64_t count,
           float* c, int64_t c_stride, int64_t columns) {
  int64_t j = 0;
  for (; j + kColumns <= columns; j += kColumns) {
    tile_of<2, kAdds, FloatVec>(rows, a, row, step, b + j, b_stride, count, c + j, c_stride);
  }
  for (; j + kFloats <= columns; j += kFloats) {
    tile_of<1, kAdds, FloatVec>(rows, a, row, step, b + j, b_stride, count, c + j, c_stride);
  }
  if constexpr (kFloats > 8) {
    if (j < columns) tile_of<1, kAdds, Eight>(rows, a, row, step, b + j, b_stride, count, c + j, c_stride);
  }
}

// to[channel][position], with `padded` zero-filled positions per channel.
void transpose(Rows from, int64_t length, int64_t channels, int64_t padded, float* to) {
  for (int64_t c = 0; c < channels; ++c) std::memset(to + c * padded + length, 0, (padded - length) * sizeof(float));
  for (int64_t first = 0; first < length; first += kFloats) {
    const int64_t last = std::min<int64_t>(first + kFloats, length);
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t p = first; p < last; ++p) to[c * padded + p] = from[p][c];
    }
  }
}

void copy(Rows from, int64_t length, int64_t channels, float* to) {
  for (int64_t p = 0; p < length; ++p) std::memcpy(to + p * channels, from[p], channels * sizeof(float));
}

// Scores of the queries [first, last) and the keys [key, key + kKeys), as far as any query sees them; those that a query
// does not see are undefined.
void multiply(const float* queries, int64_t stride, int64_t first, int64_t last, const float* transposed, int64_t padded,
              int64_t channels, int64_t key, float* scores) {
  for (int64_t r = first; r < last; r += kRows) {
    const int64_t rows = std::min<int64_t>(kRows, last - r), seen = std::min(r + rows - key, kKeys);
    if (seen <= 0) continue;
    const int64_t columns = (seen + kFloats - 1) / kFloats * kFloats;
    tiles<false>(rows, queries + r * stride, stride, 1, transposed + key, padded, channels,
                 scores + (r - first) * kKeys, kKeys, columns);
  }
}

// The maximum over the first `seen` numbers of a row.
float top_of(const float* row, int64_t seen) {
  return max_row<float>(seen, [&](int64_t i, auto n) { return load(row + i, n); });
}

// row = exp(scale * row - shift) in its first `seen` numbers, 0 up to `until`; returns their sum. `shift` is at least
// scale * row: a positive difference, from the rounding of a large `shift`, counts as 0.
float exponentials(float* row, int64_t seen, int64_t until, float scale, float shift) {
  auto sums = sum_row<float, 1>(seen, [&](int64_t i, auto n, FloatVec* sum) {
    FloatVec e = only(vec_exp_negative(vec_at_most(load(row + i, n) * scale - shift, 0.0f)), n);
    store(row + i, e, n);
    sum[0] += e;
  });
  for (int64_t i = seen; i < until; ++i) row[i] = 0;
  return sums.of[0];
}

// Number of keys of the block at `key` that are visible to query `r`, and to the last query of its tile.
int64_t seen_by(int64_t r, int64_t key) { return std::clamp<int64_t>(r + 1 - key, 0, kKeys); }
int64_t seen_by_tile(int64_t r, int64_t first, int64_t last, int64_t key) {
  return seen_by(std::min(first + (r - first) / kRows * kRows + kRows, last) - 1, key);
}

// Memory of a task, undefined. It is freed at the end: a thread that kept it would hold 10 x length x channels numbers.
using TaskMemory = std::unique_ptr<float[]>;
TaskMemory room(int64_t count) { return TaskMemory(new float[count]); }

// The output rows of one head, from its group's transposed keys and its values; `result` has room for kQueries rows.
void forward_head(const Attention& of, Rows query, const float* keys, const float* values, float* result, float* out,
                  int64_t out_stride, float* statistics) {
  const int64_t d = of.channels, padded = of.padded();
  float scores[kQueries * kKeys], top[kQueries], sum[kQueries];
  for (int64_t first = 0; first < of.length; first += kQueries) {
    const int64_t last = std::min(first + kQueries, of.length);
    std::memset(result, 0, kQueries * d * sizeof(float));
    std::fill(top, top + kQueries, -INFINITY);
    std::fill(sum, sum + kQueries, 0.0f);
    for (int64_t key = 0; key < last; key += kKeys) {
      multiply(query.data, query.stride, first, last, keys, padded, d, key, scores);
      for (int64_t r = first; r < last; ++r) {
        const int64_t at = r - first, seen = seen_by(r, key);
        float* row = scores + at * kKeys;
        const float before = top[at];
        if (seen) top[at] = std::max(before, of.scale * top_of(row, seen));
        const float added = exponentials(row, seen, seen_by_tile(r, first, last, key), of.scale, top[at]);
        if (key == 0) {
          sum[at] = added;
        } else if (seen) {
          const float shrink = std::exp(before - top[at]);
          sum[at] = sum[at] * shrink + added;
          for_row<float>(d, [&](int64_t i, auto n) {
            store(result + at * d + i, load(result + at * d + i, n) * shrink, n);
          });
        }
      }
      for (int64_t r = first; r < last; r += kRows) {
        const int64_t seen = seen_by_tile(r, first, last, key);
        if (seen) {
          tiles<true>(std::min<int64_t>(kRows, last - r), scores + (r - first) * kKeys, kKeys, 1, values + key * d, d,
                      seen, result + (r - first) * d, d, d);
        }
      }
    }
    for (int64_t r = first; r < last; ++r) {
      const int64_t at = r - first;
      const float factor = 1.0f / sum[at];
      for_row<float>(d, [&](int64_t i, auto n) {
        store(out + r * out_stride + i, load(result + at * d + i, n) * factor, n);
      });
      statistics[r] = top[at];
      statistics[of.length + r] = factor;
    }
  }
}

// Adds to the gradients of one head's queries, and of its group's keys and values. All but `out` are [length, channels].
void backward_head(const Attention& of, const float* query, const float* keys, const float* transposed_keys,
                   const float* transposed_values, Rows out, const float* dout, const float* statistics, float* dquery,
                   float* dkey, float* dvalue) {
  const int64_t d = of.channels, padded = of.padded();
  float scores[kQueries * kKeys], dscores[kQueries * kKeys], dots[kQueries];
  for (int64_t first = 0; first < of.length; first += kQueries) {
    const int64_t last = std::min(first + kQueries, of.length);
    for (int64_t r = first; r < last; ++r) {
      dots[r - first] = sum_row<float, 1>(d, [&](int64_t i, auto n, FloatVec* sum) {
                          sum[0] += load(out[r] + i, n) * load(dout + r * d + i, n);
                        }).of[0];
    }
    for (int64_t key = 0; key < last; key += kKeys) {
      multiply(query, d, first, last, transposed_keys, padded, d, key, scores);
      multiply(dout, d, first, last, transposed_values, padded, d, key, dscores);
      for (int64_t r = first; r < last; ++r) {
        const int64_t at = r - first, seen = seen_by(r, key), until = seen_by(last - 1, key);
        float *row = scores + at * kKeys, *drow = dscores + at * kKeys;
        exponentials(row, seen, until, of.scale, statistics[r]);
        const float dot = dots[at], scale = of.scale, factor = statistics[of.length + r];
        for_row<float>(seen, [&](int64_t i, auto n) {
          FloatVec weight = load(row + i, n) * factor;
          store(row + i, weight, n);
          store(drow + i, weight * (load(drow + i, n) - dot) * scale, n);
        });
        for (int64_t i = seen; i < until; ++i) drow[i] = 0;
      }
      for (int64_t r = first; r < last; r += kRows) {
        const int64_t seen = seen_by_tile(r, first, last, key);
        if (seen) {
          tiles<true>(std::min<int64_t>(kRows, last - r), dscores + (r - first) * kKeys, kKeys, 1, keys + key * d, d,
                      seen, dquery + r * d, d, d);
        }
      }
      // Keys after a query are not visible to it: the sum over queries begins at the first that sees the tile.
      for (int64_t column = 0; column < seen_by(last - 1, key); column += kRows) {
        const int64_t columns = std::min<int64_t>(kRows, seen_by(last - 1, key) - column);
        const int64_t from = std::max(first, key + column);
        const int64_t at = (from - first) * kKeys + column;
        tiles<true>(columns, scores + at, 1, kKeys, dout + from * d, d, last - from, dvalue + (key + column) * d, d, d);
        tiles<true>(columns, dscores + at, 1, kKeys, query + from * d, d, last - from, dkey + (key + column) * d, d, d);
      }
    }
  }
}

void add(const float* from, int64_t count, float* to) {
  for_row<float>(count, [&](int64_t i, auto n) { store(to + i, load(to + i, n) + load(from + i, n), n); });
}

void unpack(const float* from, int64_t length, int64_t channels, float* to, int64_t stride) {
  for (int64_t p = 0; p < length; ++p) std::memcpy(to + p * stride, from + p * channels, channels * sizeof(float));
}

}  // namespace
}  // namespace megatron

using namespace megatron;

namespace {
Attention attention_of(const void* shape, double scale) {
  const auto* s = static_cast<const int64_t*>(shape);
  return {s[0], s[1], s[2], s[3], s[4], static_cast<float>(scale)};
}
}  // namespace

const char* megatron_causal_attention(int64_t dtype, const void* shape, const void* strides, const void* query,
                                      const void* key, const void* value, double scale, void* out, void* statistics,
                                      int64_t threads, void*) {
  if (dtype != Float32) return kWrongDType;
  const Attention of = attention_of(shape, scale);
  const auto* stride = static_cast<const HeadStrides*>(strides);
  const HeadTasks tasks(of, threads);
  parallel_for(tasks.count, threads, [&](int64_t number) {
    const HeadTask task(tasks, number);
    const int64_t b = task.batch, d = of.channels, packed = of.padded() * d;
    const TaskMemory memory = room(2 * packed + kQueries * d);
    float *keys = memory.get(), *values = keys + packed, *result = keys + 2 * packed;
    transpose({at<float>(key, stride[1].of(b, task.group)), stride[1].position}, of.length, d, of.padded(), keys);
    copy({at<float>(value, stride[2].of(b, task.group)), stride[2].position}, of.length, d, values);
    for (int64_t h = task.first; h < task.last; ++h) {
      forward_head(of, {at<float>(query, stride[0].of(b, h)), stride[0].position}, keys, values, result,
                   at<float>(out, stride[3].of(b, h)), stride[3].position,
                   at<float>(statistics, (b * of.heads + h) * 2 * of.length));
    }
  });
  return nullptr;
}

const char* megatron_causal_attention_backward(int64_t dtype, const void* shape, const void* strides,
                                               const void* query, const void* key, const void* value, const void* out,
                                               const void* dout, const void* statistics, double scale, void* dquery,
                                               void* dkey, void* dvalue, int64_t threads, void*) {
  if (dtype != Float32) return kWrongDType;
  const Attention of = attention_of(shape, scale);
  const auto* stride = static_cast<const HeadStrides*>(strides);
  const HeadTasks tasks(of, threads);
  const int64_t d = of.channels, padded = of.padded() * d, size = of.length * d;
  // Gradients of keys and values from each head. They are added in the order of heads, whatever the number of parts.
  const TaskMemory of_heads = room(tasks.parts > 1 ? of.batch * of.heads * 2 * size : 0);
  const auto unpack_both = [&](const float* both, int64_t b, int64_t group) {
    unpack(both, of.length, d, at<float>(dkey, stride[6].of(b, group)), stride[6].position);
    unpack(both + size, of.length, d, at<float>(dvalue, stride[7].of(b, group)), stride[7].position);
  };
  parallel_for(tasks.count, threads, [&](int64_t number) {
    const HeadTask task(tasks, number);
    const int64_t b = task.batch, group = task.group;
    const TaskMemory memory = room(10 * padded);
    float *keys = memory.get(), *transposed_keys = keys + padded, *transposed_values = keys + 2 * padded;
    float *queries = keys + 3 * padded, *douts = keys + 4 * padded, *dq = keys + 5 * padded;
    float *sum = keys + 6 * padded, *next = keys + 8 * padded;
    const Rows of_key{at<float>(key, stride[1].of(b, group)), stride[1].position};
    copy(of_key, of.length, d, keys);
    transpose(of_key, of.length, d, of.padded(), transposed_keys);
    transpose({at<float>(value, stride[2].of(b, group)), stride[2].position}, of.length, d, of.padded(),
              transposed_values);
    for (int64_t h = task.first; h < task.last; ++h) {
      float* dk = tasks.parts > 1 ? of_heads.get() + (b * of.heads + h) * 2 * size : h == task.first ? sum : next;
      std::memset(dk, 0, 2 * size * sizeof(float));
      std::memset(dq, 0, size * sizeof(float));
      copy({at<float>(query, stride[0].of(b, h)), stride[0].position}, of.length, d, queries);
      copy({at<float>(dout, stride[4].of(b, h)), stride[4].position}, of.length, d, douts);
      backward_head(of, queries, keys, transposed_keys, transposed_values,
                    {at<float>(out, stride[3].of(b, h)), stride[3].position}, douts,
                    at<float>(statistics, (b * of.heads + h) * 2 * of.length), dq, dk, dk + size);
      unpack(dq, of.length, d, at<float>(dquery, stride[5].of(b, h)), stride[5].position);
      if (dk == next) add(next, 2 * size, sum);
    }
    if (tasks.parts == 1) unpack_both(sum, b, group);
  });
  if (tasks.parts == 1) return nullptr;
  parallel_for(of.batch * of.groups, threads, [&](int64_t pair) {
    float* sum = of_heads.get() + pair * tasks.heads * 2 * size;
    for (int64_t head = 1; head < tasks.heads; ++head) add(sum + head * 2 * size, 2 * size, sum);
    unpack_both(sum, pair / of.groups, pair % of.groups);
  });
  return nullptr;
}
