"""A rank's tensors as boxes of global tensors, the unit that checkpoints store and read."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from megatron_core.parallel.boxes import Box, flat_boxes
from megatron_core.parallel.sharding import ShardSpec, spec_of


@dataclass(frozen=True)
class TensorBox:
    """A box of a global tensor and this rank's memory for it."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    memory: Tensor
    """A view in the shape of the box."""
    owned: bool
    """Whether this rank saves the box."""


def parameter_pieces(named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[TensorBox]:
    """The boxes of whole parameters, named ``model.NAME``."""
    for name, parameter in named:
        shape = tuple(parameter.shape)
        numel = parameter.numel()
        yield from pieces_of(f"model.{name}", spec_of(parameter), shape, 0, numel, parameter.data.view(-1))


def pieces_of(
    name: str, spec: ShardSpec, local_shape: tuple[int, ...], start: int, stop: int, flat: Tensor
) -> Iterator[TensorBox]:
    """The boxes of ``flat``, which holds the elements ``start ... stop - 1`` of this rank's part of the tensor
    ``name``."""
    # A shard of a flat buffer ends anywhere in a row. It is stored as boxes of the global tensor, not as a flat range,
    # so that any other layout can intersect them with its own.
    for local, number in flat_boxes(local_shape, start, stop):
        memory = flat[number - start : number - start + local.numel].view(local.shape)
        for indices in spec.parts:
            common = indices.local.intersect(local)
            if common is not None:  # padding belongs to no part
                offset = tuple(b - a for a, b in zip(indices.local.start, indices.whole.start, strict=True))
                yield TensorBox(
                    name, spec.global_shape, common.shifted(offset), memory[common.within(local)], indices.owned
                )
