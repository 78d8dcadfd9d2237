#include "common/norm.h"
#include "cpu/rows.h"

namespace megatron {
namespace {

template <typename T>
void forward_row(const T* x, const T* weight, const T* bias, double epsilon, T* y, Wide<T>* mean, Wide<T>* rstd,
                 int64_t columns) {
  auto values = sum_row<T, 1>(columns, [=](int64_t i, auto n, auto* sums) { sums[0] += load(x + i, n); });
  const Wide<T> center = values.of[0] / columns;
  auto squares = sum_row<T, 1>(columns, [=](int64_t i, auto n, auto* sums) {
    auto v = only(load(x + i, n) - center, n);
    sums[0] += v * v;
  });
  const Wide<T> scale = 1 / std::sqrt(squares.of[0] / columns + static_cast<Wide<T>>(epsilon));
  *mean = center;
  *rstd = scale;
  for_row<T>(columns, [=](int64_t i, auto n) {
    store(y + i, (load(x + i, n) - center) * scale * load(weight + i, n) + load(bias + i, n), n);
  });
}

template <typename T>
void backward_row(const T* dy, const T* x, const T* weight, Wide<T> center, Wide<T> rstd, T* dx, Wide<T>* dweight,
                  Wide<T>* dbias, int64_t columns) {
  auto products = sum_row<T, 2>(columns, [=](int64_t i, auto n, auto* sums) {
    auto grad = load(dy + i, n), grad_xhat = grad * ((load(x + i, n) - center) * rstd), scale = load(weight + i, n);
    sums[0] += grad * scale;
    sums[1] += grad_xhat * scale;
    add_to(dweight + i, grad_xhat, n);
    add_to(dbias + i, grad, n);
  });
  const Wide<T> mean = products.of[0] / columns, slope = products.of[1] / columns * rstd;
  for_row<T>(columns, [=](int64_t i, auto n) {
    auto grad = rstd * (load(dy + i, n) * load(weight + i, n) - mean - (load(x + i, n) - center) * slope);
    store(dx + i, grad, n);
  });
}

}  // namespace
}  // namespace megatron

using namespace megatron;

const char* megatron_layer_norm(int64_t dtype, int64_t rows, int64_t columns, const void* x, int64_t x_stride,
                                const void* weight, const void* bias, double epsilon, void* y, void* statistics,
                                int64_t threads, void*) {
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    for_rows(rows, threads, [=](int64_t row) {
      forward_row(at<T>(x, row * x_stride), at<T>(weight), at<T>(bias), epsilon,
                  at<T>(y, row * columns), at<Wide<T>>(statistics, row),
                  at<Wide<T>>(statistics, rows + row), columns);
    });
  });
}

const char* megatron_layer_norm_backward(int64_t dtype, int64_t rows, int64_t columns, const void* dy,
                                         int64_t dy_stride, const void* x, int64_t x_stride, const void* weight,
                                         const void* statistics, void* dx, void* dweight, void* dbias, void* partial,
                                         int64_t num_partials, int64_t threads, void*) {
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    using A = Wide<T>;
    for_rows_with_partials(rows, threads, at<A>(partial), num_partials, 2 * columns, [=](int64_t row, A* own) {
      backward_row(at<T>(dy, row * dy_stride), at<T>(x, row * x_stride), at<T>(weight),
                   *at<A>(statistics, row), *at<A>(statistics, rows + row), at<T>(dx, row * columns), own,
                   own + columns, columns);
    });
    sum_partials(at<A>(partial), num_partials, 2 * columns, at<T>(dweight), columns, threads);
    sum_partials(at<A>(partial) + columns, num_partials, 2 * columns, at<T>(dbias), columns, threads);
  });
}
