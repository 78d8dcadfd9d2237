// What the CUDA library says of itself.
#include "common/interface.h"

int megatron_interface() { return megatron::kInterface; }

#ifdef MEGATRON_ARCHITECTURES
// What nvcc compiled this library for.
MEGATRON_API const char* megatron_architectures() { return MEGATRON_ARCHITECTURES; }
#endif
