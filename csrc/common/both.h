// Functions compiled for the host and, by nvcc, also for the device.
#pragma once
#if defined(__CUDACC__)
#define MEGATRON_BOTH __host__ __device__ __forceinline__
#define MEGATRON_UNROLL _Pragma("unroll")
#else
#define MEGATRON_BOTH inline __attribute__((always_inline))
#define MEGATRON_UNROLL _Pragma("GCC unroll 16")
#endif
