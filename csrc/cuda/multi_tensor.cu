// The C interface of the CUDA library: operations on lists of tensors.
#include "common/multi_tensor.h"
#include "cuda/launch.cuh"
#include "cuda/multi_tensor.cuh"

using namespace megatron;

// Calls launch(table, chunks, done) for the entries of a list, in tables of the maximum size; `done` is the number of
// chunks in earlier tables.
template <int kPointers, typename F>
const char* with_tables(const void* list, int64_t num_tensors, int64_t chunk, F launch) {
  const int64_t* row = static_cast<const int64_t*>(list);
  Table<kPointers> table{};
  int64_t done = 0;
  int filled = 0;
  for (int64_t left = num_tensors; left > 0; --left, row += 1 + kPointers) {
    table.size[filled] = row[0];
    for (int p = 0; p < kPointers; ++p) table.pointers[filled][p] = reinterpret_cast<void*>(row[1 + p]);
    table.first_chunk[filled + 1] = table.first_chunk[filled] + (row[0] + chunk - 1) / chunk;
    if (++filled < kTableTensors && left > 1) continue;
    if (const char* error = launch(table, table.first_chunk[filled], done)) return error;
    done += table.first_chunk[filled];
    filled = 0;
  }
  return nullptr;
}

const char* megatron_squared_norm(int64_t dtype, int64_t num_tensors, const void* table, int64_t chunk, void* partial,
                                  int64_t num_partials, void* total, int64_t, void* stream) {
  const Array<double> sums(partial, num_partials);
  const char* error = with_dtype(dtype, [=](auto type) {
    auto kernel = squared_norm_kernel<decltype(type)>;
    return with_tables<1>(table, num_tensors, chunk, [=](const Table<1>& part, int64_t chunks, int64_t done) {
      return LAUNCH(kernel, chunks, kTableThreads, stream, part, chunk, sums, done);
    });
  });
  if (error) return error;
  return LAUNCH(sum_doubles, 1, kTableThreads, stream, sums, num_partials, Array<double>(total, 1));
}

const char* megatron_largest(int64_t dtype, int64_t num_tensors, const void* table, int64_t chunk, void* partial,
                             int64_t num_partials, int64_t, void* stream) {
  const Array<float> largest(partial, num_partials);
  return with_dtype(dtype, [=](auto type) {
    auto kernel = largest_kernel<decltype(type)>;
    return with_tables<1>(table, num_tensors, chunk, [=](const Table<1>& part, int64_t chunks, int64_t done) {
      return LAUNCH(kernel, chunks, kTableThreads, stream, part, chunk, largest, done);
    });
  });
}

const char* megatron_scale(int64_t dtype, int64_t num_tensors, const void* table, int64_t chunk, double factor,
                           int64_t, void* stream) {
  return with_dtype(dtype, [=](auto type) {
    auto kernel = scale_kernel<decltype(type)>;
    return with_tables<1>(table, num_tensors, chunk, [=](const Table<1>& part, int64_t chunks, int64_t) {
      return LAUNCH(kernel, chunks, kTableThreads, stream, part, chunk, static_cast<float>(factor));
    });
  });
}

const char* megatron_adamw(int64_t grad_dtype, int64_t copy_dtype, int64_t num_tensors, const void* table,
                           int64_t chunk, double factor, double beta1, double beta2, double keep, double step_size,
                           double correction, double epsilon, int64_t, void* stream) {
  const AdamW by{float(factor), float(beta1),     float(1 - beta1),  float(beta2),  float(1 - beta2),
                 float(keep),   float(step_size), float(correction), float(epsilon)};
  return with_dtype(grad_dtype, [=](auto type) {
    auto kernel = adamw_kernel<decltype(type)>;
    return with_tables<5>(table, num_tensors, chunk, [=](const Table<5>& part, int64_t chunks, int64_t) {
      return LAUNCH(kernel, chunks, kTableThreads, stream, part, chunk, copy_dtype, by);
    });
  });
}
