// Sums, minima and maxima of several arrays, element by element, in the order of the arrays.
#pragma once
#include <type_traits>

#include "cpu/transport/transport.h"
#include "cpu/vec.h"

namespace megatron {

// NaN propagates, as in torch: a non-finite loss on one rank must reach all ranks.
template <typename V> MEGATRON_INLINE V combined(Reduction reduction, V a, V b) {
  if (reduction == Sum) return a + b;
  return (reduction == Maximum ? b > a : b < a) | (b != b) ? b : a;
}

// Sums of half-precision types are computed in float32 and rounded once.
template <Reduction kReduction, typename T>
void reduce_floats(const char* const* inputs, int64_t members, char* out, int64_t count) {
  for_row<T>(count, [=](int64_t i, auto n) {
    auto total = load(reinterpret_cast<const T*>(inputs[0]) + i, n);
    for (int64_t member = 1; member < members; ++member) {
      total = combined(kReduction, total, load(reinterpret_cast<const T*>(inputs[member]) + i, n));
    }
    store(reinterpret_cast<T*>(out) + i, total, n);
  });
}

// Integers wrap around: sums are computed as unsigned numbers.
template <Reduction kReduction, typename T>
void reduce_integers(const char* const* inputs, int64_t members, char* out, int64_t count) {
  using U = std::make_unsigned_t<T>;
  for (int64_t i = 0; i < count; ++i) {
    T total = reinterpret_cast<const T*>(inputs[0])[i];
    for (int64_t member = 1; member < members; ++member) {
      const T next = reinterpret_cast<const T*>(inputs[member])[i];
      total = kReduction == Sum ? T(U(total) + U(next)) : combined(kReduction, total, next);
    }
    reinterpret_cast<T*>(out)[i] = total;
  }
}

template <Reduction kReduction>
void reduce_as(int64_t dtype, const char* const* inputs, int64_t members, char* out, int64_t bytes) {
  switch (dtype) {
    case Float32: return reduce_floats<kReduction, float>(inputs, members, out, bytes / 4);
    case Float64: return reduce_floats<kReduction, double>(inputs, members, out, bytes / 8);
    case BFloat16: return reduce_floats<kReduction, bf16>(inputs, members, out, bytes / 2);
    case Float16: return reduce_floats<kReduction, fp16>(inputs, members, out, bytes / 2);
    case Int8: return reduce_integers<kReduction, int8_t>(inputs, members, out, bytes);
    case Int16: return reduce_integers<kReduction, int16_t>(inputs, members, out, bytes / 2);
    case Int32: return reduce_integers<kReduction, int32_t>(inputs, members, out, bytes / 4);
    case Int64: return reduce_integers<kReduction, int64_t>(inputs, members, out, bytes / 8);
    case UInt8: return reduce_integers<kReduction, uint8_t>(inputs, members, out, bytes);
  }
}

inline void reduce(int64_t dtype, int64_t reduction, const char* const* inputs, int64_t members, char* out,
                   int64_t bytes) {
  switch (reduction) {
    case Sum: return reduce_as<Sum>(dtype, inputs, members, out, bytes);
    case Minimum: return reduce_as<Minimum>(dtype, inputs, members, out, bytes);
    case Maximum: return reduce_as<Maximum>(dtype, inputs, members, out, bytes);
  }
}

}  // namespace megatron
