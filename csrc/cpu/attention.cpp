#include "common/attention.h"

#include <vector>

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

// A tile: c[i][j] (+)= sum over k of a[i * row + k * step] * b[k][j] for kI rows and kV vectors;
// count > 0.
template <int kI, int kV, bool kAdds>
MEGATRON_INLINE void tile(const float* a, int64_t row, int64_t step, const float* b, int64_t b_stride, int64_t count,
                          float* c, int64_t c_stride) {
  FloatVec sums[kI][kV];
  for (int i = 0; i < kI; ++i) {
    for (int v = 0; v < kV; ++v) sums[i][v] = FloatVec{};
  }
  do {  // at least once: otherwise compilers keep the sums in memory
    FloatVec right[kV];
    for (int v = 0; v < kV; ++v) right[v] = load(b + v * kFloats, All{});
    for (int i = 0; i < kI; ++i) {
      for (int v = 0; v < kV; ++v) sums[i][v] += a[i * row] * right[v];
    }
    a += step, b += b_stride;
  } while (--count > 0);
  for (int i = 0; i < kI; ++i) {
    for (int v = 0; v < kV; ++v) {
      float* to = c + i * c_stride + v * kFloats;
      store(to, kAdds ? load(to, All{}) + sums[i][v] : sums[i][v], All{});
    }
  }
}

// The same for 1 to kRows rows.
template <int kV, bool kAdds, int kI = kRows>
MEGATRON_INLINE void tile_of(int64_t rows, const float* a, int64_t row, int64_t step, const float* b, int64_t b_stride,
                             int64_t count, float* c, int64_t c_stride) {
  if constexpr (kI > 1) {
    if (rows < kI) return tile_of<kV, kAdds, kI - 1>(rows, a, row, step, b, b_stride, count, c, c_stride);
  }
  tile<kI, kV, kAdds>(a, row, step, b, b_stride, count, c, c_stride);
}

// A row of tiles, of `columns` (a multiple of a vector).
template <bool kAdds>
void tiles(int64_t rows, const float* a, int64_t row, int64_t step, const float* b, int64_t b_stride, int64_t count,
           float* c, int64_t c_stride, int64_t columns) {
  int64_t j = 0;
  for (; j + kColumns <= columns; j += kColumns) {
    tile_of<2, kAdds>(rows, a, row, step, b + j, b_stride, count, c + j, c_stride);
  }
  if (j < columns) tile_of<1, kAdds>(rows, a, row, step, b + j, b_stride, count, c + j, c_stride);
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

float* room(std::vector<float>& memory, int64_t count) {
  if (memory.size() < size_t(count)) memory.resize(count);
  return memory.data();
}

// The output rows of one head; `packed` holds the group's transposed keys and its values.
void forward_head(const Attention& of, Rows query, const float* keys, const float* values, float* out,
                  int64_t out_stride, float* statistics) {
  const int64_t d = of.channels, padded = of.padded();
  float scores[kQueries * kKeys], top[kQueries], sum[kQueries];
  thread_local std::vector<float> memory;
  float* result = room(memory, kQueries * d);
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
  parallel_for(of.batch * of.groups, threads, [&](int64_t task) {
    const int64_t b = task / of.groups, group = task % of.groups, queries = of.heads / of.groups, d = of.channels;
    thread_local std::vector<float> memory;
    float* keys = room(memory, of.padded() * d * 2);
    float* values = keys + of.padded() * d;
    transpose({at<float>(key, stride[1].of(b, group)), stride[1].position}, of.length, d, of.padded(), keys);
    copy({at<float>(value, stride[2].of(b, group)), stride[2].position}, of.length, d, values);
    for (int64_t h = group * queries; h < (group + 1) * queries; ++h) {
      forward_head(of, {at<float>(query, stride[0].of(b, h)), stride[0].position}, keys, values,
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
  parallel_for(of.batch * of.groups, threads, [&](int64_t task) {
    const int64_t b = task / of.groups, group = task % of.groups, heads = of.heads / of.groups, d = of.channels;
    const int64_t padded = of.padded() * d, size = of.length * d;
    thread_local std::vector<float> memory;
    float* keys = room(memory, 8 * padded);
    float *transposed_keys = keys + padded, *transposed_values = keys + 2 * padded;
    float *dq = keys + 3 * padded, *dk = keys + 4 * padded, *dv = keys + 5 * padded;
    float *queries = keys + 6 * padded, *douts = keys + 7 * padded;
    const Rows of_key{at<float>(key, stride[1].of(b, group)), stride[1].position};
    copy(of_key, of.length, d, keys);
    transpose(of_key, of.length, d, of.padded(), transposed_keys);
    transpose({at<float>(value, stride[2].of(b, group)), stride[2].position}, of.length, d, of.padded(),
              transposed_values);
    std::memset(dk, 0, size * sizeof(float));
    std::memset(dv, 0, size * sizeof(float));
    for (int64_t h = group * heads; h < (group + 1) * heads; ++h) {
      std::memset(dq, 0, size * sizeof(float));
      copy({at<float>(query, stride[0].of(b, h)), stride[0].position}, of.length, d, queries);
      copy({at<float>(dout, stride[4].of(b, h)), stride[4].position}, of.length, d, douts);
      backward_head(of, queries, keys, transposed_keys, transposed_values,
                    {at<float>(out, stride[3].of(b, h)), stride[3].position}, douts,
                    at<float>(statistics, (b * of.heads + h) * 2 * of.length), dq, dk, dv);
      unpack(dq, of.length, d, at<float>(dquery, stride[5].of(b, h)), stride[5].position);
    }
    unpack(dk, of.length, d, at<float>(dkey, stride[6].of(b, group)), stride[6].position);
    unpack(dv, of.length, d, at<float>(dvalue, stride[7].of(b, group)), stride[7].position);
  });
  return nullptr;
}
