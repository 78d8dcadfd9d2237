#include "common/norm.h"
#include "cpu/rows.h"

namespace megatron {
namespace {

template <typename T>
void forward_row(const T* x, const T* weight, double epsilon, T* y, Wide<T>* rstd, int64_t columns) {
  auto squares = sum_row<T, 1>(columns, [=](int64_t i, auto n, auto* sums) {
    auto v = load(x + i, n);
    sums[0] += v * v;
  });
  const Wide<T> scale = 1 / std::sqrt(squares.of[0] / columns + static_cast<Wide<T>>(epsilon));
  *rstd = scale;
  for_row<T>(columns, [=](int64_t i, auto n) { store(y + i, load(x + i, n) * scale * load(weight + i, n), n); });
}

template <typename T>
void backward_row(const T* dy, const T* x, const T* weight, Wide<T> rstd, T* dx, Wide<T>* dweight, int64_t columns) {
  auto products = sum_row<T, 1>(columns, [=](int64_t i, auto n, auto* sums) {
    auto grad = load(dy + i, n), grad_xhat = grad * (load(x + i, n) * rstd);
    sums[0] += grad_xhat * load(weight + i, n);
    add_to(dweight + i, grad_xhat, n);
  });
  const Wide<T> mean = products.of[0] / columns;
  for_row<T>(columns, [=](int64_t i, auto n) {
    auto grad = rstd * (load(dy + i, n) * load(weight + i, n) - load(x + i, n) * (rstd * mean));
    store(dx + i, grad, n);
  });
}

}  // namespace
}  // namespace megatron

using namespace megatron;

const char* megatron_rms_norm(int64_t dtype, int64_t rows, int64_t columns, const void* x, int64_t x_stride,
                              const void* weight, double epsilon, void* y, void* rstd, int64_t threads, void*) {
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    for_rows(rows, threads, [=](int64_t row) {
      forward_row(at<T>(x, row * x_stride), at<T>(weight), epsilon,
                  at<T>(y, row * columns), at<Wide<T>>(rstd, row), columns);
    });
  });
}

const char* megatron_rms_norm_backward(int64_t dtype, int64_t rows, int64_t columns, const void* dy,
                                       int64_t dy_stride, const void* x, int64_t x_stride, const void* weight,
                                       const void* rstd, void* dx, void* dweight, void* partial, int64_t num_partials,
                                       int64_t threads, void*) {
  return with_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    using A = Wide<T>;
    for_rows_with_partials(rows, threads, at<A>(partial), num_partials, columns, [=](int64_t row, A* own) {
      backward_row(at<T>(dy, row * dy_stride), at<T>(x, row * x_stride), at<T>(weight),
                   *at<A>(rstd, row), at<T>(dx, row * columns), own, columns);
    });
    sum_partials(at<A>(partial), num_partials, columns, at<T>(dweight), columns, threads);
  });
}
