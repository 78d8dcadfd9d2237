// The only parts of CUDA that kernels may use: indices, __syncthreads, shuffles, atomicMax, Array (whose elements and
// 16-byte vectors are checked on the host), Shared, and LAUNCH. nvcc compiles them as CUDA; a C++ compiler uses
// csrc/host_cuda, which runs the same sources on the CPU.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstring>

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
template <typename T> __device__ T of_bits(uint16_t bits);
template <> __device__ inline bf16 of_bits<bf16>(uint16_t bits) { return __ushort_as_bfloat16(bits); }
template <> __device__ inline fp16 of_bits<fp16>(uint16_t bits) { return __ushort_as_half(bits); }
__device__ inline uint16_t bits_of(bf16 v) { return __bfloat16_as_ushort(v); }
__device__ inline uint16_t bits_of(fp16 v) { return __half_as_ushort(v); }
// exp(v) in two instructions, with a relative error of 2^-22 plus up to |v| 2^-24.
__device__ inline float fast_exp(float v) { return __expf(v); }

// An even number of 16-bit elements, in 32-bit words: nvcc would unpack single elements right after each load, and so
// wait for each load before starting the next.
template <typename T, int N> struct Words {
  struct Element {
    uint32_t& word;
    int shift;
    __device__ operator T() const { return of_bits<T>(static_cast<uint16_t>(word >> shift)); }
    __device__ void operator=(T v) {
      word = (word & ~(0xffffu << shift)) | static_cast<uint32_t>(bits_of(v)) << shift;
    }
  };
  uint32_t words[N / 2];
  __device__ Element operator[](int k) { return {words[k / 2], k % 2 * 16}; }
  __device__ T operator[](int k) const { return of_bits<T>(static_cast<uint16_t>(words[k / 2] >> k % 2 * 16)); }
};
template <typename T, int N, bool kWords> struct ElementsOf { using type = T[N]; };
template <typename T, int N> struct ElementsOf<T, N, true> { using type = Words<T, N>; };

// N elements that are moved at once, in up to 16 bytes.
template <typename T, int N> struct alignas(N * sizeof(T)) Pack {
  typename ElementsOf<T, N, sizeof(T) == 2 && N % 2 == 0>::type of;
};

// One store of 16 bytes: nvcc would split a store of computed values into four for sm_80 and sm_90a, each of which
// touches all of its sectors.
__device__ inline void store_16_bytes(void* p, const void* from) {
  uint4 v;
  memcpy(&v, from, sizeof v);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// A tensor of `size` elements; absent if the pointer is null, with size 0.
template <typename T> struct Array {
  T* p;
  __host__ __device__ Array(const void* pointer, int64_t) : p(static_cast<T*>(const_cast<void*>(pointer))) {}
  __device__ explicit operator bool() const { return p != nullptr; }
  __device__ T get(int64_t i) const { return p[i]; }
  __device__ void set(int64_t i, T v) const { p[i] = v; }
  template <int N> __device__ Pack<T, N> load(int64_t i) const { return *reinterpret_cast<const Pack<T, N>*>(p + i); }
  template <int N> __device__ void store(int64_t i, Pack<T, N> v) const {
    if constexpr (sizeof v == 16) store_16_bytes(p + i, &v);
    else *reinterpret_cast<Pack<T, N>*>(p + i) = v;
  }
};
template <typename T, int N> struct Shared {
  T of[N];
  __device__ T& operator[](int i) { return of[i]; }
};
}  // namespace megatron

#define LAUNCH(kernel, blocks, threads, stream, ...)                                                    \
  ((blocks) > megatron::kMostBlocks                                                                     \
       ? "a GPU takes 2^31 - 1 blocks at most: split the tensor"                                        \
       : (kernel<<<static_cast<unsigned>(blocks), threads, 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__), \
          megatron::launch_error()))

namespace megatron {
constexpr int64_t kMostBlocks = 0x7fffffff;
inline const char* words_of(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }
inline const char* launch_error() { return words_of(cudaGetLastError()); }
}  // namespace megatron
#else
#include "host_cuda/platform.h"
#endif
