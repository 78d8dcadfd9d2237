"""Weight gather over data-parallel ranks in FP8: half the bytes of bfloat16, and bitwise the same products.

Each rank quantises its shard with the scales of the whole weight; the amax is a maximum over all shards. Received
weights are stored in the weights' own dtype as data / scale. The layer quantises them again with the same scale and
obtains the same 8-bit numbers, because the rounding error is much smaller than half a step of the format.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_core.data_parallel.settings import Span
from megatron_core.features.fp8.casts import E4M3, Blocks, Quantised, block_amax, cast_to_fp8
from megatron_core.features.fp8.products import FP8Products
from megatron_core.parallel.collectives import all_gather_flat_, all_reduce_
from megatron_core.parallel.groups import Group
from megatron_core.parallel.handles import Handle


@dataclass(frozen=True)
class QuantizationBlocks:
    """Blocks of a parameter ``[E, O, I]`` or ``[O, I]``: rows of blocks of E matrices."""

    parameter: nn.Parameter
    blocks: Blocks

    @classmethod
    def of(cls, parameter: nn.Parameter) -> "QuantizationBlocks":
        """Return the grid of a weight, with the block size of its layer."""
        return cls(parameter, _layer_of(parameter).blocks("weight", 1))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the scales."""
        *experts, rows, columns = self.parameter.shape
        height, width = self.blocks.rows or rows, self.blocks.columns or columns
        return (*experts, -(-rows // height), -(-columns // width))

    def rows(self, start: int, stop: int) -> Tensor:
        """Return for each row with some of the elements ``start ... stop - 1`` its row of blocks, over all matrices."""
        height = self.parameter.shape[-2]
        row = torch.arange(start // self._width, -(-stop // self._width), device=self.parameter.device)
        return row // height * self.shape[-2] + row % height // (self.blocks.rows or height)

    def whole_rows(self, flat: Tensor, start: int) -> Tensor:
        """Return ``flat``, the elements from ``start`` on, as whole rows padded with zeros on both sides."""
        before = start % self._width
        after = -(before + flat.numel()) % self._width
        return torch.nn.functional.pad(flat, (before, after)).view(-1, self._width)

    @property
    def _width(self) -> int:
        return self.parameter.shape[-1]


class Arriving:
    """Handle of a gather; ``wait`` writes the received data to ``weights``."""

    def __init__(
        self, works: Handle, full: Tensor, weights: Tensor, targets: Sequence[tuple[int, QuantizationBlocks, Tensor]]
    ) -> None:
        self._works = works
        self._full = full
        self._weights = weights
        self._parts = targets

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for all shards and convert them to the dtype of ``weights``."""
        self._works.wait()
        for offset, grid, scale in self._parts:
            parameter = grid.parameter
            data = self._full[offset : offset + parameter.numel()].view(E4M3).view(parameter.shape)
            wide = Quantised(data, scale, grid.blocks).dequantised(self._weights.dtype)
            self._weights[offset : offset + parameter.numel()] = wide.flatten()
            _layer_of(parameter).weight_is_narrow = True


@torch.no_grad()
def start_fp8_gather(
    weights: Tensor, shard: Tensor, spans: Sequence[Span], parameters: Sequence[tuple[int, nn.Parameter]], group: Group
) -> tuple[Arriving, int]:
    """Gather in FP8; see ``StartGather``."""
    grids = {parameter: QuantizationBlocks.of(parameter) for _, parameter in parameters}
    scales = _scales(shard, spans, grids, group)
    sent = torch.zeros(shard.numel(), dtype=torch.uint8, device=shard.device)
    for parameter, start, stop, offset in spans:
        grid = grids[parameter]
        by_row = scales[parameter].reshape(-1, grid.shape[-1])[grid.rows(start, stop)]
        rows = grid.whole_rows(shard[offset : offset + stop - start], start)
        backend = _layer_of(parameter).backend
        narrow = cast_to_fp8(rows, by_row, E4M3, Blocks(1, grid.blocks.columns), backend=backend)
        before = start % parameter.shape[-1]
        sent[offset : offset + stop - start] = narrow.data.view(torch.uint8).flatten()[before : before + stop - start]
    full = torch.empty(weights.numel(), dtype=torch.uint8, device=shard.device)
    works = all_gather_flat_(full, sent, group, async_op=True)
    targets = [(offset, grids[parameter], scales[parameter]) for offset, parameter in parameters]
    return Arriving(works, full, weights, targets), sent.nbytes


def _scales(
    shard: Tensor, spans: Sequence[Span], grids: dict[nn.Parameter, QuantizationBlocks], group: Group
) -> dict[nn.Parameter, Tensor]:
    """Compute the scales of the whole weights from the shards of all ranks."""
    wide = torch.promote_types(shard.dtype, torch.float32)
    amax = {p: torch.zeros(grid.shape, dtype=wide, device=shard.device) for p, grid in grids.items()}
    for parameter, start, stop, offset in spans:
        grid = grids[parameter]
        rows_of_weight = grid.whole_rows(shard[offset : offset + stop - start], start)
        backend = _layer_of(parameter).backend
        block_maxima = block_amax(rows_of_weight, Blocks(1, grid.blocks.columns), backend=backend)
        rows = grid.rows(start, stop)[:, None].expand_as(block_maxima)
        amax[parameter].view(-1, grid.shape[-1]).scatter_reduce_(0, rows, block_maxima.to(wide), "amax")
    flat = torch.cat([largest.flatten() for largest in amax.values()])
    all_reduce_(flat, group, maximum=True)
    reduced = flat.split([largest.numel() for largest in amax.values()])
    return {
        parameter: _layer_of(parameter).scale_of_amax("weight", largest.view(grid.shape), grid.blocks, record=True)
        for (parameter, grid), largest in zip(grids.items(), reduced, strict=True)
    }


def _layer_of(parameter: nn.Parameter) -> FP8Products:
    layer = getattr(parameter, "fp8", None)
    assert isinstance(layer, FP8Products), "only weights of layers in FP8 are gathered like this"
    return layer
