// Random numbers as a function of a counter and a key: Philox 4x32 with 10 rounds (Salmon et al. 2011, section 3.3).
#pragma once
#include <cstdint>

#include "common/both.h"

namespace megatron {

// Four 32-bit words, each in the lower half of a W: of one counter if W is uint64_t, of several if it is a vector.
template <typename W> struct Four { W of[4]; };

// The full product of the lower half of w and m.
template <typename W> struct Product {
  static MEGATRON_BOTH W of(W w, uint32_t m) { return (w & 0xffffffff) * m; }
};

// The keys of the rounds, precomputed in an array.
struct Keys {
  uint64_t low[10], high[10];
  MEGATRON_BOTH explicit Keys(uint64_t key) {
    for (uint32_t round = 0; round < 10; ++round) {
      low[round] = static_cast<uint32_t>(key) + round * 0x9E3779B9u;
      high[round] = static_cast<uint32_t>(key >> 32) + round * 0xBB67AE85u;
    }
  }
};

// Replaces each counter by four random words; the upper halves are arbitrary before and after.
template <typename W, int kCount> MEGATRON_BOTH void philox(Four<W> (&counters)[kCount], const Keys& keys) {
  MEGATRON_UNROLL
  for (int round = 0; round < 10; ++round) {
    for (Four<W>& counter : counters) {
      const W a = Product<W>::of(counter.of[0], 0xD2511F53u), b = Product<W>::of(counter.of[2], 0xCD9E8D57u);
      const W first = (b >> 32) ^ counter.of[1] ^ keys.low[round], third = (a >> 32) ^ counter.of[3] ^ keys.high[round];
      counter = Four<W>{{first, b, third, a}};
    }
  }
}

}  // namespace megatron
