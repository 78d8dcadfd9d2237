#include "common/norm.h"
#include "cpu/rows.h"

namespace megatron {
namespace {

// Whether the next row of x, where nothing is added to it, is fetched by a row's last pass, which writes, and not by the
// pass before: with AVX2 rows of 16 KiB take four fifths of the time so. With AVX-512 that has not been measured.
constexpr bool kFetchesLast = kVectorBytes < 64;

template <bool kStream, typename T>
void forward_row(const T* x, int64_t x_stride, const T* residual, int64_t residual_stride, const T* weight,
                 const T* bias, double epsilon, T* y, T* sum, Wide<T>* mean, Wide<T>* rstd, int64_t columns) {
  T* added = kStream && residual ? own_row<T>(columns) : sum;
  const T* row = residual ? added : x;
  auto values = sum_row_in_pairs<T, 1>(columns, [=](int64_t i, auto n, auto* sums) {
    sums[0] += with_residual(x, residual, added, i, n);
  });
  const Wide<T> center = values.of[0] / columns;
  auto squares = sum_row_in_pairs<T, 1>(columns, [=](int64_t i, auto n, auto* sums) {
    if (residual || !kFetchesLast) prefetch(x, x_stride + i);
    auto u = load(row + i, n);
    if constexpr (kStream) {  // while nothing else goes to memory
      if (residual) stream_copy(sum + i, row + i, n);
    }
    auto v = only(u - center, n);
    sums[0] += v * v;
  });
  const Wide<T> scale = 1 / std::sqrt(squares.of[0] / columns + static_cast<Wide<T>>(epsilon));
  *mean = center;
  *rstd = scale;
  const T* next = residual ? residual + residual_stride : kFetchesLast ? x + x_stride : nullptr;
  for_row_in_pairs<T>(columns, [=](int64_t i, auto n) {
    if (next) prefetch(next, i);
    auto v = load(row + i, n);
    put<kStream>(y + i, (v - center) * scale * load(weight + i, n) + load(bias + i, n), n);
  });
}

template <bool kStream, typename T>
void backward_row(const T* dy, int64_t dy_stride, const T* dsum, int64_t dsum_stride, const T* x, int64_t x_stride,
                  const T* weight, Wide<T> center, Wide<T> rstd, T* dx, Wide<T>* dweight, Wide<T>* dbias,
                  int64_t columns) {
  auto products = sum_row_in_pairs<T, 2>(columns, [=](int64_t i, auto n, auto* sums) {
    auto grad = load(dy + i, n), grad_xhat = grad * ((load(x + i, n) - center) * rstd), scale = load(weight + i, n);
    sums[0] += grad * scale;
    sums[1] += grad_xhat * scale;
    add_to(dweight + i, grad_xhat, n);
    add_to(dbias + i, grad, n);
  });
  const bool ahead = fetches_ahead(dsum, columns);
  const Wide<T> mean = products.of[0] / columns, slope = products.of[1] / columns * rstd;
  for_row_in_pairs<T>(columns, [=](int64_t i, auto n) {
    if (ahead) {
      prefetch(dy, dy_stride + i);
      prefetch(x, x_stride + i);
      if (dsum) prefetch(dsum, dsum_stride + i);
    }
    auto grad = rstd * (load(dy + i, n) * load(weight + i, n) - mean - (load(x + i, n) - center) * slope);
    if (dsum) grad += load(dsum + i, n);
    put<kStream>(dx + i, grad, n);
  });
}

}  // namespace
}  // namespace megatron

using namespace megatron;

const char* megatron_layer_norm(int64_t dtype, int64_t rows, int64_t columns, const void* x, int64_t x_stride,
                                const void* residual, int64_t residual_stride, const void* weight, const void* bias,
                                double epsilon, void* y, void* sum, void* statistics, int64_t threads, void*) {
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    with_streams<T>(y, rows, columns, [=](auto stream) {
      for_rows(rows, threads, [=](int64_t row) {
        forward_row<stream>(at<T>(x, row * x_stride), x_stride, at<T>(residual, row * residual_stride),
                            residual_stride, at<T>(weight), at<T>(bias), epsilon, at<T>(y, row * columns),
                            at<T>(sum, row * columns), at<Wide<T>>(statistics, row),
                            at<Wide<T>>(statistics, rows + row), columns);
      });
    });
  });
}

const char* megatron_layer_norm_backward(int64_t dtype, int64_t rows, int64_t columns, const void* dy,
                                         int64_t dy_stride, const void* dsum, int64_t dsum_stride, const void* x,
                                         int64_t x_stride, const void* weight, const void* statistics, void* dx,
                                         void* dweight, void* dbias, void* partial, int64_t num_partials,
                                         int64_t threads, void*) {
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    using A = Wide<T>;
    with_streams<T>(dx, rows, columns, [=](auto stream) {
      for_rows_with_partials(rows, threads, at<A>(partial), num_partials, 2 * columns, [=](int64_t row, A* own) {
        backward_row<stream>(at<T>(dy, row * dy_stride), dy_stride, at<T>(dsum, row * dsum_stride), dsum_stride,
                             at<T>(x, row * x_stride), x_stride, at<T>(weight), *at<A>(statistics, row),
                             *at<A>(statistics, rows + row), at<T>(dx, row * columns), own, own + columns, columns);
      });
    });
    sum_partials(at<A>(partial), num_partials, 2 * columns, at<T>(dweight), columns, threads);
    sum_partials(at<A>(partial) + columns, num_partials, 2 * columns, at<T>(dbias), columns, threads);
  });
}
