#include "common/attention.h"

#include "cpu/pack.h"
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

// Numbers of a row in complete vectors.
int64_t in_vectors(int64_t seen) { return (seen + kFloats - 1) / kFloats * kFloats; }

// Scores of the queries [first, last), which are at `queries`, and the keys [key, key + kKeys), as far as any query sees
// them, in complete vectors; those that a query does not see are undefined.
void multiply(const float* queries, int64_t first, int64_t last, const float* transposed, int64_t padded,
              int64_t channels, int64_t key, float* scores) {
  for (int64_t r = first; r < last; r += kRows) {
    const int64_t rows = std::min<int64_t>(kRows, last - r), seen = std::min(r + rows - key, kKeys);
    if (seen <= 0) continue;
    tiles<false>(rows, queries + (r - first) * channels, channels, 1, transposed + key, padded, channels,
                 scores + (r - first) * kKeys, kKeys, in_vectors(seen));
  }
}

// Makes the numbers from `seen` on -infinity, up to a complete vector.
void hide(float* row, int64_t seen) {
  SignedBits lanes;
  for (int lane = 0; lane < kFloats; ++lane) lanes[lane] = lane;
  float* last = row + seen / kFloats * kFloats;
  const auto inside = static_cast<int32_t>(seen % kFloats);
  if (inside) store(last, lanes < inside ? load(last, All{}) : FloatVec{} - INFINITY, All{});
}

// exp(scale * v - shift). `shift` is at least scale * v: a positive difference, from the rounding of a large `shift`,
// counts as 0.
MEGATRON_INLINE FloatVec exponential(FloatVec v, float scale, float shift) {
  return vec_exp_negative(vec_at_most(v * scale - shift, 0.0f));
}

// row = exp(scale * row - shift) in its first `seen` numbers, after which numbers are hidden, and 0 up to `until`;
// returns the sum.
float exponentials(float* row, int64_t seen, int64_t until, float scale, float shift) {
  auto sums = sum_row<float, 1>(in_vectors(seen), [&](int64_t i, auto n, FloatVec* sum) {
    FloatVec e = exponential(load(row + i, n), scale, shift);
    store(row + i, e, n);
    sum[0] += e;
  });
  for (int64_t i = in_vectors(seen); i < until; ++i) row[i] = 0;
  return sums.of[0];
}

// Number of keys of the block at `key` that are visible to query `r`, and to the last query of its tile.
int64_t seen_by(int64_t r, int64_t key) { return std::clamp<int64_t>(r + 1 - key, 0, kKeys); }
int64_t seen_by_tile(int64_t r, int64_t first, int64_t last, int64_t key) {
  return seen_by(std::min(first + (r - first) / kRows * kRows + kRows, last) - 1, key);
}

// The output rows of one head, from its group's transposed keys and its values; `room` is for 2 kQueries rows.
void forward_head(const Attention& of, Rows query, const float* keys, const float* values, float* room, float* out,
                  int64_t out_stride, float* statistics) {
  const int64_t d = of.channels, padded = of.padded();
  float *queries = room, *result = room + kQueries * d;
  alignas(64) float scores[kQueries * kKeys], top[kQueries], sum[kQueries];
  for (int64_t first = 0; first < of.length; first += kQueries) {
    const int64_t last = std::min(first + kQueries, of.length);
    pack(query, first, last, d, queries);
    prefetch(query, last, std::min(last + kQueries, of.length), d);
    std::memset(result, 0, kQueries * d * sizeof(float));
    std::fill(top, top + kQueries, -INFINITY);
    std::fill(sum, sum + kQueries, 0.0f);
    for (int64_t key = 0; key < last; key += kKeys) {
      multiply(queries, first, last, keys, padded, d, key, scores);
      for (int64_t r = first; r < last; ++r) {
        const int64_t at = r - first, seen = seen_by(r, key);
        float* row = scores + at * kKeys;
        const float before = top[at];
        if (seen) {
          hide(row, seen);
          const auto all = [&](int64_t i, auto n) { return load(row + i, n); };
          top[at] = std::max(before, of.scale * max_row<float>(in_vectors(seen), all));
        }
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

// The gradient of one head's queries; adds to those of its group's keys and values. Rows of keys, values and their
// gradients are [length, channels]; `room` is for 3 kQueries rows.
void backward_head(const Attention& of, Rows query, const float* keys, const float* transposed_keys,
                   const float* transposed_values, Rows out, Rows dout, const float* statistics, float* room,
                   float* dquery, int64_t dquery_stride, float* dkey, float* dvalue) {
  const int64_t d = of.channels, padded = of.padded();
  alignas(64) float scores[kQueries * kKeys], dscores[kQueries * kKeys], dots[kQueries];
  float *queries = room, *douts = room + kQueries * d, *dqueries = room + 2 * kQueries * d;
  for (int64_t first = 0; first < of.length; first += kQueries) {
    const int64_t last = std::min(first + kQueries, of.length);
    pack(query, first, last, d, queries);
    pack(dout, first, last, d, douts);
    for (int64_t r = first; r < last; ++r) {
      dots[r - first] = sum_row<float, 1>(d, [&](int64_t i, auto n, FloatVec* sum) {
                          sum[0] += load(out[r] + i, n) * load(douts + (r - first) * d + i, n);
                        }).of[0];
    }
    for (Rows each : {query, dout, out}) prefetch(each, last, std::min(last + kQueries, of.length), d);
    std::memset(dqueries, 0, kQueries * d * sizeof(float));
    for (int64_t key = 0; key < last; key += kKeys) {
      multiply(queries, first, last, transposed_keys, padded, d, key, scores);
      multiply(douts, first, last, transposed_values, padded, d, key, dscores);
      for (int64_t r = first; r < last; ++r) {
        const int64_t at = r - first, seen = seen_by(r, key), until = seen_by(last - 1, key);
        float *row = scores + at * kKeys, *drow = dscores + at * kKeys;
        const float dot = dots[at], scale = of.scale, factor = statistics[of.length + r], shift = statistics[r];
        for_row<float>(in_vectors(seen), [&](int64_t i, auto n) {
          FloatVec weight = exponential(load(row + i, n), scale, shift) * factor;
          store(row + i, weight, n);
          store(drow + i, weight * (load(drow + i, n) - dot) * scale, n);
        });
        for (int64_t i = seen; i < until; ++i) row[i] = drow[i] = 0;
      }
      for (int64_t r = first; r < last; r += kRows) {
        const int64_t seen = seen_by_tile(r, first, last, key);
        if (seen) {
          tiles<true>(std::min<int64_t>(kRows, last - r), dscores + (r - first) * kKeys, kKeys, 1, keys + key * d, d,
                      seen, dqueries + (r - first) * d, d, d);
        }
      }
      // Keys after a query are not visible to it: the sum over queries begins at the first that sees the tile.
      for (int64_t column = 0; column < seen_by(last - 1, key); column += kRows) {
        const int64_t columns = std::min<int64_t>(kRows, seen_by(last - 1, key) - column);
        const int64_t from = std::max(first, key + column) - first, count = last - first - from;
        const int64_t at = from * kKeys + column, to = (key + column) * d;
        tiles<true>(columns, scores + at, 1, kKeys, douts + from * d, d, count, dvalue + to, d, d);
        tiles<true>(columns, dscores + at, 1, kKeys, queries + from * d, d, count, dkey + to, d, d);
      }
    }
    unpack(dqueries, last - first, d, dquery + first * dquery_stride, dquery_stride);
  }
}

void add(const float* from, int64_t count, float* to) {
  for_row<float>(count, [&](int64_t i, auto n) { store(to + i, load(to + i, n) + load(from + i, n), n); });
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
    const TaskMemory memory = room(2 * packed + 2 * kQueries * d);
    float *keys = memory.get(), *values = keys + packed, *of_block = keys + 2 * packed;
    transpose({at<float>(key, stride[1].of(b, task.group)), stride[1].position}, of.length, d, of.padded(), keys);
    pack({at<float>(value, stride[2].of(b, task.group)), stride[2].position}, 0, of.length, d, values);
    for (int64_t h = task.first; h < task.last; ++h) {
      forward_head(of, {at<float>(query, stride[0].of(b, h)), stride[0].position}, keys, values, of_block,
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
    const TaskMemory memory = room(7 * padded + 3 * kQueries * d);
    float *keys = memory.get(), *transposed_keys = keys + padded, *transposed_values = keys + 2 * padded;
    float *sum = keys + 3 * padded, *next = keys + 5 * padded, *of_block = keys + 7 * padded;
    const Rows of_key{at<float>(key, stride[1].of(b, group)), stride[1].position};
    pack(of_key, 0, of.length, d, keys);
    transpose(of_key, of.length, d, of.padded(), transposed_keys);
    transpose({at<float>(value, stride[2].of(b, group)), stride[2].position}, of.length, d, of.padded(),
              transposed_values);
    for (int64_t h = task.first; h < task.last; ++h) {
      float* dk = tasks.parts > 1 ? of_heads.get() + (b * of.heads + h) * 2 * size : h == task.first ? sum : next;
      std::memset(dk, 0, 2 * size * sizeof(float));
      backward_head(of, {at<float>(query, stride[0].of(b, h)), stride[0].position}, keys, transposed_keys,
                    transposed_values, {at<float>(out, stride[3].of(b, h)), stride[3].position},
                    {at<float>(dout, stride[4].of(b, h)), stride[4].position},
                    at<float>(statistics, (b * of.heads + h) * 2 * of.length), of_block,
                    at<float>(dquery, stride[5].of(b, h)), stride[5].position, dk, dk + size);
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
