// The common interface of the native libraries.
//
// Every argument is a pointer, an int64_t or a double, so that the caller needs no table of signatures. Pointers are on
// the library's device; null means absent. A row has `columns` contiguous elements; a stride is the distance between
// rows in elements. Tensors without a stride are contiguous. `dtype` is a DType; statistics and sums (`rstd`, `mean`,
// `partial` ...) are double for Float64, else float. `threads` is for CPUs, `stream` for GPUs. A function returns null,
// or an error message. Each family of operations has a header in this folder.
#pragma once
#include <cstdint>

#define MEGATRON_API extern "C" __attribute__((visibility("default")))

namespace megatron {
// Increase it whenever a function is added or its signature changes; megatron_core/ops/native.py accepts no other
// version.
constexpr int kInterface = 14;
enum DType : int64_t { Float32 = 0, Float64 = 1, BFloat16 = 2, Float16 = 3 };
constexpr const char* kWrongDType = "unsupported data type";
}  // namespace megatron

// kInterface of the built library.
MEGATRON_API int megatron_interface();
