#include "common/multi_tensor.h"

#include <algorithm>
#include <vector>

#include "cpu/rows.h"
#include "cpu/vec_math.h"

namespace megatron {
namespace {

// A chunk of one entry of the list: its number among all chunks, the tensors' pointers, and its range of elements.
struct Chunk {
  int64_t number;
  const int64_t* pointers;
  int64_t first, count;

  template <typename T> T* of(int tensor) const { return at<T>(reinterpret_cast<void*>(pointers[tensor]), first); }
};

// Calls work(Chunk) for every chunk of a table with this number of pointers per row.
template <typename F>
void for_chunks(const void* table, int64_t num_tensors, int pointers, int64_t size, int64_t threads, F work) {
  const int64_t *rows = at<int64_t>(table), width = 1 + pointers;
  std::vector<int64_t> begin{0};  // the number of each tensor's first chunk, then the total
  for (int64_t i = 0; i < num_tensors; ++i) begin.push_back(begin.back() + (rows[i * width] + size - 1) / size);
  parallel_for(begin.back(), threads, [&](int64_t number) {
    const int64_t tensor = std::upper_bound(begin.begin(), begin.end(), number) - begin.begin() - 1;
    const int64_t *row = rows + tensor * width, first = (number - begin[tensor]) * size;
    work(Chunk{number, row + 1, first, std::min(size, row[0] - first)});
  });
}

typedef float HalfVec __attribute__((vector_size(kVectorBytes / 2)));

// Without the intrinsics GCC 12 converts in narrower registers and joins the parts.
MEGATRON_INLINE DoubleVec doubles(HalfVec v) {
  return __builtin_convertvector(v, DoubleVec);
}

// The squares of all lanes as doubles, which are exact for floats; for a FloatVec each is a sum of two.
MEGATRON_INLINE DoubleVec squares(DoubleVec v) { return v * v; }
MEGATRON_INLINE DoubleVec squares(FloatVec v) {
  struct Halves { HalfVec lower, upper; };
  const auto halves = same_bits<Halves>(v);
  const DoubleVec a = doubles(halves.lower), b = doubles(halves.upper);
  return a * a + b * b;
}

template <typename T> double sum_of_squares(const T* x, int64_t count) {
  return sum_row<T, 1, double>(count, [=](int64_t i, auto n, DoubleVec* sums) {
    sums[0] += squares(load(x + i, n));
  }).of[0];
}

template <typename T> Wide<T> largest_magnitude(const T* x, int64_t count) {
  Wide<T> lanes[kLanes<T>];
  decltype(magnitude(lanes[0])) most[kLanes<T>] = {};
  for_row<T>(count, [&](int64_t i, auto n) {
    store(lanes, load(x + i, n), All());
    for (int k = 0; k < kLanes<T>; ++k) most[k] = std::max(most[k], magnitude(lanes[k]));
  });
  return number(*std::max_element(most, most + kLanes<T>));
}

template <typename A> struct AdamW { A factor, beta1, rest1, beta2, rest2, keep, step_size, correction, epsilon; };

template <typename G, typename C>
void update(AdamW<Wide<G>> by, const G* grad, Wide<G>* weight, Wide<G>* mean, Wide<G>* square, C* copy, int64_t count) {
  for_row<G>(count, [=](int64_t i, auto n) {
    auto g = load(grad + i, n) * by.factor;
    auto m = load(mean + i, n) * by.beta1 + g * by.rest1;
    auto v = load(square + i, n) * by.beta2 + g * g * by.rest2;
    auto w = load(weight + i, n) * by.keep - m * by.step_size / (vec_sqrt(v) * by.correction + by.epsilon);
    store(mean + i, m, n);
    store(square + i, v, n);
    store(weight + i, w, n);
    if constexpr (sizeof(C) == 2 && sizeof(Wide<G>) == 4) {
      if (copy) store(copy + i, w, n);
    }
  });
}

}  // namespace
}  // namespace megatron

using namespace megatron;

const char* megatron_squared_norm(int64_t dtype, int64_t num_tensors, const void* table, int64_t chunk, void* partial,
                                  int64_t num_partials, void* total, int64_t threads, void*) {
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    double* sums_of_chunks = at<double>(partial);
    for_chunks(table, num_tensors, 1, chunk, threads, [=](const Chunk& own) {
      sums_of_chunks[own.number] = sum_of_squares(own.of<const T>(0), own.count);
    });
    *at<double>(total) = sum_row<double, 1>(num_partials, [=](int64_t i, auto n, DoubleVec* sums) {
      sums[0] += load(sums_of_chunks + i, n);
    }).of[0];
  });
}

const char* megatron_largest(int64_t dtype, int64_t num_tensors, const void* table, int64_t chunk, void* partial,
                             int64_t, int64_t threads, void*) {
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    for_chunks(table, num_tensors, 1, chunk, threads, [=](const Chunk& own) {
      at<Wide<T>>(partial)[own.number] = largest_magnitude(own.of<const T>(0), own.count);
    });
  });
}

const char* megatron_scale(int64_t dtype, int64_t num_tensors, const void* table, int64_t chunk, double factor,
                           int64_t threads, void*) {
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    for_chunks(table, num_tensors, 1, chunk, threads, [=](const Chunk& own) {
      T* x = own.of<T>(0);
      for_row<T>(own.count, [=](int64_t i, auto n) { store(x + i, load(x + i, n) * Wide<T>(factor), n); });
    });
  });
}

const char* megatron_adamw(int64_t grad_dtype, int64_t copy_dtype, int64_t num_tensors, const void* table,
                           int64_t chunk, double factor, double beta1, double beta2, double keep, double step_size,
                           double correction, double epsilon, int64_t threads, void*) {
  const char* error = kWrongDType;
  with_dtype(grad_dtype, [=, &error](auto grad_type) {
    using G = decltype(grad_type);
    using A = Wide<G>;
    const AdamW<A> by{A(factor), A(beta1), A(1 - beta1), A(beta2), A(1 - beta2),
                      A(keep), A(step_size), A(correction), A(epsilon)};
    error = with_dtype(copy_dtype, [=](auto copy_type) {
      using C = decltype(copy_type);
      for_chunks(table, num_tensors, 5, chunk, threads, [=](const Chunk& own) {
        update(by, own.of<const G>(0), own.of<A>(1), own.of<A>(2), own.of<A>(3), own.of<C>(4), own.count);
      });
    });
  });
  return error;
}
