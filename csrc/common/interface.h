// What every native library offers to Python, whichever device it is for.
//
// Every argument is a pointer, an int64_t or a double, so that the caller needs no table of signatures. Pointers are on
// the library's device; a null pointer stands for what is absent. Rows are `columns` elements that follow one another;
// a stride counts elements between the beginnings of rows. Tensors without a stride are contiguous. `dtype` is a
// DType; statistics and sums (`rstd`, `mean`, `partial` ...) are double for Float64, else float. `threads` is for CPUs,
// `stream` for GPUs. A function returns null, or what went wrong. Each family of operations has a header beside this.
#pragma once
#include <cstdint>

#define MEGATRON_API extern "C" __attribute__((visibility("default")))

namespace megatron {
// To be counted up whenever a function is added or its signature changes; megatron_core/ops/native.py calls no other
// version.
constexpr int kInterface = 7;
enum DType : int64_t { Float32 = 0, Float64 = 1, BFloat16 = 2, Float16 = 3 };
constexpr const char* kWrongDType = "unsupported data type";
}  // namespace megatron

// kInterface, as the library was built with it.
MEGATRON_API int megatron_interface();
