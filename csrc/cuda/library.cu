// Version and architectures of the CUDA library.
#include "common/interface.h"
#include "cuda/platform.cuh"

int megatron_interface() { return megatron::kInterface; }

#ifdef MEGATRON_ARCHITECTURES
// The architectures for which this library was compiled.
MEGATRON_API const char* megatron_architectures() { return MEGATRON_ARCHITECTURES; }

static __global__ void any_kernel() {}

// The reason why the kernels cannot run on the current device (driver older than the linked runtime, or unsupported
// device); null if they can.
MEGATRON_API const char* megatron_obstacle() {
  cudaFuncAttributes attributes;
  const char* obstacle = megatron::words_of(cudaFuncGetAttributes(&attributes, any_kernel));
  cudaGetLastError();  // clear the error, so that no later launch reports it
  return obstacle;
}
#endif
