// Rotary positions: one block for all heads of one position of one sequence.
#pragma once
#include "common/rope.h"
#include "cuda/rows.cuh"

namespace megatron {

// Rotates N pairs; pair k is elements k * kStep and k * kStep + kApart. A sign of -1 gives the inverse rotation.
template <int kStep, int kApart, typename T, int N>
__device__ inline void turn(T (&pairs)[2 * N], const Pack<float, N>& cos, const Pack<float, N>& sin, float sign) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    T &a = pairs[k * kStep], &b = pairs[k * kStep + kApart];
    const float old_a = to_float(a), old_b = to_float(b), s = sign * sin.of[k];
    a = from_float<T>(old_a * cos.of[k] - old_b * s);
    b = from_float<T>(old_b * cos.of[k] + old_a * s);
  }
}

// A thread processes the same N pairs of every `down`th head, so that it loads their cosines and sines once.
template <typename T, int N>
__global__ void __launch_bounds__(256)
    rope_kernel(RopeShape shape, Array<T> x, Array<float> cos, Array<float> sin, float sign, bool interleaved,
                Array<T> y) {
  const int64_t position = blockIdx.x / shape.batch, sequence = blockIdx.x % shape.batch;
  const int64_t row = position * shape.length_stride + sequence * shape.batch_stride;
  const int64_t table = position * shape.table_length_stride + sequence * shape.table_batch_stride;
  const int heads = static_cast<int>(shape.groups * shape.heads), per_group = static_cast<int>(shape.heads);
  const int64_t out = int64_t(blockIdx.x) * heads * shape.channels;
  auto head_of_x = [&](int head) {
    return row + head / per_group * shape.group_stride + head % per_group * shape.head_stride;
  };

  const int half = static_cast<int>(shape.rotated / 2), packs = half / N, threads = static_cast<int>(blockDim.x);
  const int across = packs < threads ? packs : threads, down = threads / across;
  const int thread = static_cast<int>(threadIdx.x), first_head = thread < across * down ? thread / across : heads;
  for (int pack = thread % across; pack < packs; pack += across) {
    const int first = interleaved ? 2 * pack * N : pack * N, second = interleaved ? first + N : first + half;
    const Pack<float, N> c = load_floats<N>(cos, table + pack * N), s = load_floats<N>(sin, table + pack * N);
    for (int head = first_head; head < heads; head += down) {
      const int64_t from = head_of_x(head), to = out + head * shape.channels;
      Pack<T, N> u = x.template load<N>(from + first), v = x.template load<N>(from + second);
      T pairs[2 * N];
      for (int k = 0; k < N; ++k) pairs[k] = u.of[k], pairs[N + k] = v.of[k];
      if (interleaved) turn<2, 1, T, N>(pairs, c, s, sign); else turn<1, N, T, N>(pairs, c, s, sign);
      for (int k = 0; k < N; ++k) u.of[k] = pairs[k], v.of[k] = pairs[N + k];
      y.template store<N>(to + first, u);
      y.template store<N>(to + second, v);
    }
  }

  const int rotated = 2 * half, passing = static_cast<int>(shape.channels - rotated) / N;
  for (int item = thread; item < heads * passing; item += threads) {
    const int head = item / passing, channel = rotated + item % passing * N;
    y.template store<N>(out + head * shape.channels + channel, x.template load<N>(head_of_x(head) + channel));
  }
}

}  // namespace megatron
