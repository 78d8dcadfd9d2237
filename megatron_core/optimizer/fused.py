"""The matrices that are stored as one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_core.parallel.sharding import Fused


def separated(matrix: Tensor, fused: Fused) -> list[Tensor]:
    """Return the matrices ``[..., rows, columns]`` that ``matrix`` consists of, each with the rows of all blocks."""
    blocks = matrix.unflatten(-2, (-1, sum(fused.rows)))
    return [block.flatten(-3, -2) for block in blocks.split(fused.rows, dim=-2)]


def joined(parts: Sequence[Tensor], fused: Fused) -> Tensor:
    """Return the matrix that consists of ``parts``: the inverse of ``separated``."""
    blocks = [part.unflatten(-2, (-1, rows)) for part, rows in zip(parts, fused.rows, strict=True)]
    return torch.cat(blocks, dim=-2).flatten(-3, -2)
