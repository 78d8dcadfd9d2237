"""Linear layers as a grid of smaller ones."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from megatron_core.any_model.partition import uniform_bounds


class TiledLinear(nn.Module):
    """``y = x W^T + b`` as ``out_splits`` rows of ``in_splits`` layers; the last layer of each row has the bias.

    ``kwargs``: of ``linear_cls``, and ``init_linear``: see ``copy_params_from``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Any = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, size in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= size:
                raise RuntimeError(f"{name}_splits={splits} must be from 1 to {name}_features={size}")
        self.is_split = in_splits > 1 and input_is_already_split
        self.in_parts, self.out_parts = uniform_bounds(in_features, in_splits), uniform_bounds(out_features, out_splits)
        self.linears: Any = nn.ModuleList()
        for low, high in pairwise(self.out_parts):
            tiles = [
                linear_cls(b - a, high - low, bias and b == in_features, **kwargs) for a, b in pairwise(self.in_parts)
            ]
            self.linears.append(nn.ModuleList(tiles))
        self.combine_out_splits = combine_out_splits
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Tensor | Sequence[Tensor]:
        """Return the output; without ``combine_out_splits`` a list of its parts."""
        parts = input_ if self.is_split else input_.tensor_split(self.in_parts[1:-1], -1)
        products = ([tile(part) for tile, part in zip(row, parts, strict=True)] for row in self.linears)
        outputs = [sum(row[1:], row[0]) for row in products]
        return torch.cat(outputs, -1) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copy weight and bias of ``other``, at stage 3 on all ranks together."""
        assert other.weight.shape == (self.out_parts[-1], self.in_parts[-1]), f"init_linear: {other} has another shape"
        with GatheredParameters(self.parameters(), modifier_rank=0):
            for row, (low, high) in zip(self.linears, pairwise(self.out_parts), strict=True):
                for tile, (start, stop) in zip(row, pairwise(self.in_parts), strict=True):
                    tile.weight.copy_(other.weight[low:high, start:stop])
                    if tile.bias is not None:
                        tile.bias.copy_(other.bias[low:high])
