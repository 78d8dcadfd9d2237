#include "common/cross_entropy.h"

#include <limits>

#include "cpu/rows.h"
#include "cpu/vec_math.h"

namespace megatron {
namespace {

// Elements that are read from memory once for their maximum, and then from the nearest cache for their exponentials.
constexpr int64_t kBlock = 2048;

template <typename T> constexpr Wide<T> kNothing = -std::numeric_limits<Wide<T>>::infinity();

template <typename A> struct Parts { A maximum, exp_sum, sum; };

template <typename T> Parts<Wide<T>> parts_of(const T* row, int64_t columns) {
  Parts<Wide<T>> parts{kNothing<T>, 0, 0};
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const T* block = row + begin;
    const int64_t size = std::min(kBlock, columns - begin);
    // NaN is not a maximum; it propagates through the sum of exponentials.
    const Wide<T> maximum =
        std::max(parts.maximum, max_row<T>(size, [=](int64_t i, auto n) { return load(block + i, n); }));
    const Wide<T> zero = maximum == kNothing<T> ? 0 : maximum;  // inf - inf would be NaN
    auto sums = sum_row<T, 2>(size, [=](int64_t i, auto n, auto* sums) {
      auto z = load(block + i, n);
      sums[0] += only(vec_exp_negative(z - zero), n);
      sums[1] += z;
    });
    parts.exp_sum = parts.exp_sum * std::exp(parts.maximum - zero) + sums.of[0];
    parts.sum += sums.of[1];
    parts.maximum = maximum;
  }
  return parts;
}

bool is_here(int64_t label, int64_t valid) { return 0 <= label && label < valid; }

template <typename T> struct Gradient { Wide<T> maximum, scale, everywhere, at_target; };

template <typename T>
void backward_row(const T* row, int64_t label, Gradient<T> of, T* grad, int64_t valid, int64_t columns) {
  auto gradient = [=](Vec<T> z) { return vec_exp_negative(z - of.maximum) * of.scale - of.everywhere; };
  const bool here = is_here(label, valid);
  Vec<T> target{};
  if (here) target = gradient(load(row + label, Some{1})) - of.at_target;  // before `grad` overwrites it
  for_row<T>(valid, [=](int64_t i, auto n) { store(grad + i, gradient(load(row + i, n)), n); });
  if (here) store(grad + label, target, Some{1});
  std::fill(grad + valid, grad + columns, T{});
}

}  // namespace
}  // namespace megatron

using namespace megatron;

const char* megatron_cross_entropy_parts(int64_t dtype, int64_t rows, int64_t valid, const void* logits,
                                         int64_t logits_stride, const void* target, int64_t first, void* parts,
                                         int64_t threads, void*) {
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    using A = Wide<T>;
    for_rows(rows, threads, [=](int64_t row) {
      const T* z = at<T>(logits, row * logits_stride);
      const Parts<A> found = parts_of(z, valid);
      const int64_t label = *at<int64_t>(target, row) - first;
      *at<A>(parts, row) = found.maximum;
      *at<A>(parts, rows + row) = found.exp_sum;
      *at<A>(parts, 2 * rows + row) = is_here(label, valid) ? load(z + label, Some{1})[0] : 0;
      *at<A>(parts, 3 * rows + row) = found.sum;
    });
  });
}

const char* megatron_cross_entropy_backward(int64_t dtype, int64_t rows, int64_t columns, int64_t valid,
                                            const void* logits, int64_t logits_stride, const void* target,
                                            int64_t first, const void* statistics, const void* dloss, double kept,
                                            double spread, void* dlogits, int64_t dlogits_stride, int64_t threads,
                                            void*) {
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    using A = Wide<T>;
    for_rows(rows, threads, [=](int64_t row) {
      const A loss = *at<A>(dloss, row);
      const Gradient<T> of{*at<A>(statistics, row), loss / *at<A>(statistics, rows + row), loss * A(spread),
                           loss * A(kept)};
      backward_row(at<T>(logits, row * logits_stride), *at<int64_t>(target, row) - first, of,
                   at<T>(dlogits, row * dlogits_stride), valid, columns);
    });
  });
}
