// The vocabulary of the kernels, which is all that they may use of CUDA: indices, __syncthreads, shuffles, Array (whose
// elements and 16-byte vectors are checked on the host), Shared, and LAUNCH. Compiled by nvcc it is CUDA; compiled by
// a C++ compiler it is csrc/host_cuda, which runs the same sources on the CPU.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace megatron {
using bf16 = __nv_bfloat16;
using fp16 = __half;

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(bf16 v) { return __bfloat162float(v); }
__device__ inline float to_float(fp16 v) { return __half2float(v); }
template <typename T> __device__ T from_float(float v);
template <> __device__ inline float from_float<float>(float v) { return v; }
template <> __device__ inline bf16 from_float<bf16>(float v) { return __float2bfloat16_rn(v); }
template <> __device__ inline fp16 from_float<fp16>(float v) { return __float2half_rn(v); }
// exp(v), its relative error 2^-22 and up to |v| 2^-24 more, in two instructions.
__device__ inline float fast_exp(float v) { return __expf(v); }

// N elements that move at once, in up to 16 bytes.
template <typename T, int N> struct alignas(N * sizeof(T)) Pack { T of[N]; };

// A tensor of `size` elements; size 0 with a null pointer where there is none.
template <typename T> struct Array {
  T* p;
  __host__ __device__ Array(const void* pointer, int64_t) : p(static_cast<T*>(const_cast<void*>(pointer))) {}
  __device__ explicit operator bool() const { return p != nullptr; }
  __device__ T get(int64_t i) const { return p[i]; }
  __device__ void set(int64_t i, T v) const { p[i] = v; }
  template <int N> __device__ Pack<T, N> load(int64_t i) const { return *reinterpret_cast<const Pack<T, N>*>(p + i); }
  template <int N> __device__ void store(int64_t i, Pack<T, N> v) const { *reinterpret_cast<Pack<T, N>*>(p + i) = v; }
};
template <typename T, int N> struct Shared {
  T of[N];
  __device__ T& operator[](int i) { return of[i]; }
};
}  // namespace megatron

#define LAUNCH(kernel, blocks, threads, stream, ...) \
  (kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__), launch_error())

namespace megatron {
inline const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
}  // namespace megatron
#else
#include "host_cuda/platform.h"
#endif
