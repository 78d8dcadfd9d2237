"""Operations under the names of its fused kernels; ``ops`` has this package's own."""
