// Version and architectures of the CUDA library.
#include "common/interface.h"
#include "cuda/platform.cuh"

int megatron_interface() { return megatron::kInterface; }

#ifdef MEGATRON_ARCHITECTURES
// What nvcc compiled this library for.
MEGATRON_API const char* megatron_architectures() { return MEGATRON_ARCHITECTURES; }

static __global__ void any_kernel() {}

// Why none of the kernels can run on the current device: a driver that is older than the runtime which is linked here,
// or a device that they are not compiled for. Null where they can.
MEGATRON_API const char* megatron_obstacle() {
  cudaFuncAttributes attributes;
  const char* obstacle = megatron::words_of(cudaFuncGetAttributes(&attributes, any_kernel));
  cudaGetLastError();  // forgotten, so that no later launch is blamed for it
  return obstacle;
}
#endif
