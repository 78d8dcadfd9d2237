// Softmax of attention scores: one block per row, which reads the visible keys once if its threads can hold them, else
// twice.
#pragma once
#include "common/scores.h"
#include "cuda/rows.cuh"

namespace megatron {

// The packs that contain a row's visible keys; they may contain other keys, too.
template <int N> struct VisiblePacks {
  int64_t first, last;  // keys
  int64_t start, count;

  __device__ explicit VisiblePacks(const ScoreRow& row)
      : first(row.first), last(row.last), start(row.first / N * N), count(row.last - start) {}

  // A bit for each key of the pack at `start + i`, set if the key is not visible.
  __device__ unsigned hidden(int64_t i) const {
    unsigned bits = 0;
    const int64_t key = start + i;
    if (key < first || key + N > last) {
      for (int k = 0; k < N; ++k) bits |= unsigned(key + k < first || key + k >= last) << k;
    }
    return bits;
  }
  // Writes zeros to the row's other packs; `row` is the start of its keys.
  template <typename T> __device__ void clear_others(Array<T> out, int64_t row, int64_t keys) const {
    const int64_t end = start + (count + N - 1) / N * N;
    for_packs<0, N>(start, [&](int, int64_t i) { out.template store<N>(row + i, Pack<T, N>{}); });
    for_packs<0, N>(keys - end, [&](int, int64_t i) { out.template store<N>(row + end + i, Pack<T, N>{}); });
  }
};

// exp2(score - from) times this is exp2(score - to).
__device__ inline float rebased(float from, float to) { return from == to ? 1.0f : exp2f(from - to); }

// The maximum score, and the sum of exp2(score - maximum), over the keys of several threads.
__device__ inline Two join_maxima(Two v, Scratch& scratch) {
  return join_block(v, Two{-INFINITY, 0}, scratch, [](Two own) {
    float top = own.a;
    for (int lane = 16; lane > 0; lane /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lane));
    return Two{top, warp_sum(Two{own.b * rebased(own.a, top), 0}).a};
  });
}

// `scale` includes log2(e).
template <typename T, int N, int kHeld>
__global__ void __launch_bounds__(1024)
    softmax_kernel(Scores shape, Array<T> scores, ScoreStrides by, Array<uint8_t> mask, ScoreStrides mask_by,
                   float scale, Array<T> probs) {
  __shared__ Scratch scratch;
  const ScoreRow row(shape, blockIdx.x);
  const VisiblePacks<N> visible(row);
  const int64_t mask_begin = row.begin(mask_by) + visible.start, out = blockIdx.x * shape.keys;
  Row<T, N, kHeld> values(scores, row.begin(by) + visible.start);
  values.fetch(visible.count);
  Pack<uint8_t, N> masked[kHeld > 0 ? kHeld : 1];  // in flight together with the scores
  if (kHeld > 0 && mask) {
    for_packs<kHeld, N>(visible.count, [&](int slot, int64_t i) {
      masked[slot] = mask.template load<N>(mask_begin + i);
    });
  }

  bool any = false;
  auto load_scaled = [&](int slot, int64_t i) {
    const Pack<T, N> v = values.load(slot, i);
    unsigned hidden = visible.hidden(i);
    if (mask) {
      const Pack<uint8_t, N> bytes = kHeld > 0 ? masked[slot] : mask.template load<N>(mask_begin + i);
      for (int k = 0; k < N; ++k) hidden |= unsigned(bytes.of[k] != 0) << k;
    }
    any |= hidden != (1u << N) - 1;
    Pack<float, N> scaled;
    for (int k = 0; k < N; ++k) scaled.of[k] = hidden >> k & 1 ? -INFINITY : to_float(v.of[k]) * scale;
    return scaled;
  };
  auto take_exponentials = [](Pack<float, N>& v, float top) {
    const float shift = top == -INFINITY ? 0 : top;
    for (int k = 0; k < N; ++k) v.of[k] = exp2f(v.of[k] - shift);
  };

  // The maximum is not known yet, so each pack uses the maximum so far, which is stored with it.
  Pack<float, N> held[kHeld > 0 ? kHeld : 1];
  float tops[kHeld > 0 ? kHeld : 1];
  Two own{-INFINITY, 0};
  for_packs<kHeld, N>(visible.count, [&](int slot, int64_t i) {
    Pack<float, N> v = load_scaled(slot, i);
    float top = own.a;
    for (int k = 0; k < N; ++k) top = fmaxf(top, v.of[k]);
    take_exponentials(v, top);
    own = Two{top, own.b * rebased(own.a, top)};
    for (int k = 0; k < N; ++k) own.b += v.of[k];
    if (kHeld > 0) held[slot] = v, tops[slot] = top;
  });
  if (any && own.b == 0) own.b = 1;  // all visible scores are -infinity: the row is NaN, not zero
  const Two all = join_maxima(own, scratch);
  const float factor = all.a > -INFINITY ? 1 / all.b : all.b == 0 ? 0 : NAN;

  for_packs<kHeld, N>(visible.count, [&](int slot, int64_t i) {
    Pack<float, N> v;
    float to_all = factor;
    if (kHeld > 0) {
      v = held[slot];
      to_all *= rebased(tops[slot], all.a);
    } else {
      v = load_scaled(slot, i);
      take_exponentials(v, all.a);
    }
    Pack<T, N> normed;
    for (int k = 0; k < N; ++k) normed.of[k] = from_float<T>(v.of[k] * to_all);
    probs.template store<N>(out + visible.start + i, normed);
  });
  visible.clear_others(probs, out, shape.keys);
}

template <typename T, int N, int kHeld>
__global__ void __launch_bounds__(1024)
    softmax_backward_kernel(Scores shape, Array<T> dprobs, ScoreStrides by, Array<T> probs, float scale,
                            Array<T> dscores) {
  __shared__ Scratch scratch;
  const ScoreRow row(shape, blockIdx.x);
  const VisiblePacks<N> visible(row);
  const int64_t out = blockIdx.x * shape.keys;
  Row<T, N, kHeld> grads(dprobs, row.begin(by) + visible.start), values(probs, out + visible.start);
  grads.fetch(visible.count);
  values.fetch(visible.count);

  auto load_visible = [&](int slot, int64_t i) {
    Pack<T, N> g = grads.load(slot, i);
    const unsigned hidden = visible.hidden(i);
    for (int k = 0; k < N; ++k)
      if (hidden >> k & 1) g.of[k] = from_float<T>(0);
    return g;
  };
  Two sums{0, 0};
  for_packs<kHeld, N>(visible.count, [&](int slot, int64_t i) {
    const Pack<T, N> g = load_visible(slot, i), p = values.load(slot, i);
    for (int k = 0; k < N; ++k) sums.a += to_float(g.of[k]) * to_float(p.of[k]);
  });
  const float mean = block_sum(sums, scratch).a;
  for_packs<kHeld, N>(visible.count, [&](int slot, int64_t i) {
    const Pack<T, N> g = load_visible(slot, i), p = values.load(slot, i);
    Pack<T, N> grad;
    for (int k = 0; k < N; ++k) grad.of[k] = from_float<T>((to_float(g.of[k]) - mean) * (to_float(p.of[k]) * scale));
    dscores.template store<N>(out + visible.start + i, grad);
  });
  visible.clear_others(dscores, out, shape.keys);
}

}  // namespace megatron
