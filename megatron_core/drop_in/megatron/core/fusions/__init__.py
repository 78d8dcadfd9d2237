"""Operations with the names of Megatron's fused kernels; ``megatron_core.ops`` has the engine's."""
