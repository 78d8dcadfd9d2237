"""For Megatron Core's users: the functions that build indices."""

from megatron_core.datasets.index_helpers import (
    build_blending_indices,
    build_exhaustive_blending_indices,
    build_sample_idx,
)

__all__ = ["build_blending_indices", "build_exhaustive_blending_indices", "build_sample_idx"]
