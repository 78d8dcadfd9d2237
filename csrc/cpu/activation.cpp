#include "common/activation.h"

#include "cpu/rows.h"
#include "cpu/vec_math.h"
// Behind vec_math.h, whose functions it is made of.
#include "common/activation_math.h"

namespace megatron {

template <> struct RealOf<DoubleVec> { using type = double; };

namespace {

template <typename T, typename N> MEGATRON_INLINE auto with_bias(const T* x, const T* bias, int64_t i, N n) {
  return bias ? load(x + i, n) + load(bias + i, n) : load(x + i, n);
}

template <typename F, typename V> MEGATRON_INLINE Curve<V> curve_of(F f, V v) { return f(v); }
template <typename F> MEGATRON_INLINE Curve<Pair> curve_of(F f, Pair v) {
  const Curve<FloatVec> first = f(v.first), second = f(v.second);
  return {{first.value, second.value}, {first.slope, second.slope}};
}

// The pieces of the row that follows x in memory: with them a gate's passes take two thirds of the time.
template <int kPieces, typename T> MEGATRON_INLINE void prefetch_pieces(const T* x, int64_t i, int64_t columns) {
  for (int piece = 0; piece < kPieces; ++piece) prefetch(x, (kPieces + piece) * columns + i);
}

template <bool kStream, int kPieces, typename F, typename T>
void forward_row(F f, const T* x, const T* bias, T* y, int64_t columns) {
  for_row_in_pairs<T>(columns, [=](int64_t i, auto n) {
    prefetch_pieces<kPieces>(x, i, columns);
    auto out = curve_of(f, with_bias(x, bias, i, n)).value;
    if constexpr (kPieces == 2) out *= with_bias(x, bias, columns + i, n);
    put<kStream>(y + i, out, n);
  });
}

template <bool kStream, int kPieces, typename F, typename T>
void backward_row(F f, const T* dy, const T* x, const T* bias, T* dx, Wide<T>* dbias, int64_t columns) {
  auto write = [=](int64_t i, auto grad, auto n) {
    put<kStream>(dx + i, grad, n);
    if (bias) add_to(dbias + i, grad, n);
  };
  for_row_in_pairs<T>(columns, [=](int64_t i, auto n) {
    prefetch(dy, columns + i);
    prefetch_pieces<kPieces>(x, i, columns);
    auto grad = load(dy + i, n);
    auto curve = curve_of(f, with_bias(x, bias, i, n));
    if constexpr (kPieces == 2) {
      write(columns + i, grad * curve.value, n);
      grad *= with_bias(x, bias, columns + i, n);
    }
    write(i, grad * curve.slope, n);
  });
}

// Whether two rows that are written side by side, past the cache, get in each other's way. Vectors that are no whole
// line of it wait for the others in buffers, and Zen 3, which seems to tell these apart by an address within 4 KiB,
// takes twice the time for rows a multiple of that apart.
template <typename T> bool collide(int64_t columns) {
  return kVectorBytes < 64 && columns * int64_t(sizeof(T)) % 4096 == 0;
}

}  // namespace
}  // namespace megatron

using namespace megatron;

const char* megatron_bias_activation(int64_t dtype, int64_t activation, int64_t rows, int64_t columns, const void* x,
                                     int64_t x_stride, const void* bias, void* y, int64_t threads, void*) {
  if (!is_activation(activation)) return kWrongActivation;
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    with_activation<std::is_same_v<T, bf16>>(activation, [=](auto f, auto pieces) {
      constexpr int kPieces = decltype(pieces)::value;
      with_streams<T>(y, rows, columns, [=](auto stream) {
        for_rows(rows, threads, [=](int64_t row) {
          forward_row<stream, kPieces>(f, at<T>(x, row * x_stride), at<T>(bias), at<T>(y, row * columns), columns);
        });
      });
    });
  });
}

const char* megatron_bias_activation_backward(int64_t dtype, int64_t activation, int64_t rows, int64_t columns,
                                              const void* dy, int64_t dy_stride, const void* x, int64_t x_stride,
                                              const void* bias, void* dx, void* dbias, void* partial,
                                              int64_t num_partials, int64_t threads, void*) {
  if (!is_activation(activation)) return kWrongActivation;
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    using A = Wide<T>;
    with_activation<std::is_same_v<T, bf16>>(activation, [=](auto f, auto pieces) {
      constexpr int kPieces = decltype(pieces)::value;
      const int64_t width = kPieces * columns;
      auto run = [=](auto stream) {
        auto backward = [=](int64_t row, A* own) {
          backward_row<stream, kPieces>(f, at<T>(dy, row * dy_stride), at<T>(x, row * x_stride), at<T>(bias),
                                        at<T>(dx, row * width), own, columns);
        };
        if (!bias) return for_rows(rows, threads, [=](int64_t row) { backward(row, nullptr); });
        for_rows_with_partials(rows, threads, at<A>(partial), num_partials, width, backward);
      };
      if (kPieces == 2 && collide<T>(columns)) {
        run(std::false_type());
      } else {
        with_streams<T>(dx, kPieces * rows, columns, run);
      }
      for (int64_t first = 0; bias && first < width; first += columns) {
        sum_partials(at<A>(partial, first), num_partials, width, at<T>(dbias, first), columns, threads);
      }
    });
  });
}
