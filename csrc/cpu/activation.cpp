#include "common/activation.h"

#include "cpu/rows.h"
#include "cpu/vec_math.h"
// Included after vec_math.h, whose functions it uses.
#include "common/activation_math.h"

namespace megatron {

template <> struct RealOf<DoubleVec> { using type = double; };

namespace {

template <typename T, typename N> MEGATRON_INLINE Vec<T> with_bias(const T* x, const T* bias, int64_t i, N n) {
  return bias ? load(x + i, n) + load(bias + i, n) : load(x + i, n);
}

template <int kPieces, typename F, typename T>
void forward_row(F f, const T* x, const T* bias, T* y, int64_t columns) {
  for_row<T>(columns, [=](int64_t i, auto n) {
    Vec<T> out = f(with_bias(x, bias, i, n)).value;
    if constexpr (kPieces == 2) out *= with_bias(x, bias, columns + i, n);
    store(y + i, out, n);
  });
}

template <int kPieces, typename F, typename T>
void backward_row(F f, const T* dy, const T* x, const T* bias, T* dx, Wide<T>* dbias, int64_t columns) {
  auto write = [=](int64_t i, Vec<T> grad, auto n) {
    store(dx + i, grad, n);
    if (bias) add_to(dbias + i, grad, n);
  };
  for_row<T>(columns, [=](int64_t i, auto n) {
    Vec<T> grad = load(dy + i, n);
    const Curve<Vec<T>> curve = f(with_bias(x, bias, i, n));
    if constexpr (kPieces == 2) {
      write(columns + i, grad * curve.value, n);
      grad *= with_bias(x, bias, columns + i, n);
    }
    write(i, grad * curve.slope, n);
  });
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
      for_rows(rows, threads, [=](int64_t row) {
        forward_row<kPieces>(f, at<T>(x, row * x_stride), at<T>(bias), at<T>(y, row * columns), columns);
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
      auto backward = [=](int64_t row, A* own) {
        backward_row<kPieces>(f, at<T>(dy, row * dy_stride), at<T>(x, row * x_stride), at<T>(bias),
                              at<T>(dx, row * width), own, columns);
      };
      if (!bias) return for_rows(rows, threads, [=](int64_t row) { backward(row, nullptr); });
      for_rows_with_partials(rows, threads, at<A>(partial), num_partials, width, backward);
      for (int64_t first = 0; bias && first < width; first += columns) {
        sum_partials(at<A>(partial, first), num_partials, width, at<T>(dbias, first), columns, threads);
      }
    });
  });
}
