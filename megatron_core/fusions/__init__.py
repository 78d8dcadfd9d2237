"""For Megatron Core's users: operations under the names of its fused kernels; ``ops`` has this package's own."""
