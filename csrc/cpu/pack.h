// Packed copies of the rows of one head: contiguous or transposed, in aligned memory.
#pragma once
#include <algorithm>
#include <memory>
#include <new>

#include "cpu/vec.h"

namespace megatron {
namespace {

// Memory of a task, undefined. It is freed at the end: a thread that kept it would hold 7 x length x channels numbers.
// It is aligned to cache lines: unaligned loads of vectors take twice the time.
constexpr std::align_val_t kAlignment{64};
struct Free {
  void operator()(float* memory) const { operator delete[](memory, kAlignment); }
};
using TaskMemory = std::unique_ptr<float[], Free>;
TaskMemory room(int64_t count) { return TaskMemory(new (kAlignment) float[count]); }

// One head's rows [length, channels] at a constant stride.
struct Rows {
  const float* data;
  int64_t stride;
  const float* operator[](int64_t row) const { return data + row * stride; }
};

// Load rows into the cache, kAhead rows before they are read: processors do not prefetch at large strides.
constexpr int64_t kAhead = 32;
void prefetch(Rows from, int64_t first, int64_t last, int64_t channels) {
  for (int64_t p = first; p < last; ++p) {
    for (int64_t c = 0; c < channels; c += 16) __builtin_prefetch(from[p] + c);
  }
}

// Transposes a square of kFloats vectors in log2(kFloats) stages, each of which doubles the number of rows in a vector.
MEGATRON_INLINE void transpose_square(FloatVec* rows) {
  constexpr int kHalf = kFloats / 2;
  for (int joined = 1; joined < kFloats; joined *= 2) {
    FloatVec next[kFloats];
    for (int i = 0; i < kHalf; ++i) {
      next[2 * i] = picked<Lower>(rows[i], rows[i + kHalf]);
      next[2 * i + 1] = picked<Upper>(rows[i], rows[i + kHalf]);
    }
    std::copy(next, next + kFloats, rows);
  }
}

// to[channel][position], with `padded` zero-filled positions per channel.
void transpose(Rows from, int64_t length, int64_t channels, int64_t padded, float* to) {
  for (int64_t c = 0; c < channels; ++c) std::memset(to + c * padded + length, 0, (padded - length) * sizeof(float));
  for (int64_t first = 0; first < length; first += kFloats) {
    const int64_t last = std::min<int64_t>(first + kFloats, length);
    prefetch(from, std::min(first + kAhead, length), std::min(last + kAhead, length), channels);
    int64_t c = 0;
    for (; last - first == kFloats && c + kFloats <= channels; c += kFloats) {
      FloatVec rows[kFloats];
      for (int i = 0; i < kFloats; ++i) rows[i] = load(from[first + i] + c, All{});
      transpose_square(rows);
      for (int i = 0; i < kFloats; ++i) store(to + (c + i) * padded + first, rows[i], All{});
    }
    for (; c < channels; ++c) {
      for (int64_t p = first; p < last; ++p) to[c * padded + p] = from[p][c];
    }
  }
}

void copy(const float* from, int64_t from_stride, int64_t length, int64_t channels, float* to, int64_t to_stride) {
  for (int64_t p = 0; p < length; ++p, from += from_stride, to += to_stride) {
    for_row<float>(channels, [=](int64_t i, auto n) { store(to + i, load(from + i, n), n); });
  }
}
void pack(Rows from, int64_t first, int64_t last, int64_t channels, float* to) {
  copy(from[first], from.stride, last - first, channels, to, channels);
}
void unpack(const float* from, int64_t length, int64_t channels, float* to, int64_t stride) {
  copy(from, channels, length, channels, to, stride);
}

}  // namespace
}  // namespace megatron
