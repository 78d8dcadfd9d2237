"""How the rows of one of our tensors lie in the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_core.config import ModelConfig
from megatron_core.parallel.boxes import Box


@dataclass(frozen=True)
class RowRange:
    """Rows of one of their tensors; the blocks of a tensor, one after the other, are the rows of ours."""

    tensor: int
    """Index among the names of ``TensorSource``."""
    start: int
    stop: int


RowRanges = Callable[[ModelConfig], list[RowRange]]


@dataclass(frozen=True)
class TensorSource:
    """Where one of our tensors is in their checkpoint; ``{n}`` in a name stands for the layer's number.

    One record serves both directions: importing reads the blocks, exporting writes them. With ``{e}`` in the names, our
    tensor has the experts' matrices one after the other, ``[E, out, in]``, and each of theirs one expert's.
    """

    names: tuple[str, ...]
    blocks: RowRanges | None = None
    """None: the rows of one tensor in their order."""
    transposed: bool = False
    """Their matrices are ``[in, out]``, as GPT-2's; vectors are never transposed."""

    def rows(self, config: ModelConfig, count: int) -> list[tuple[int, RowRange]]:
        """The blocks, each with the row of ours at which it begins; ours has ``count`` rows."""
        blocks = [RowRange(0, 0, count)] if self.blocks is None else self.blocks(config)
        found, at = [], 0
        for block in blocks:
            found.append((at, block))
            at += block.stop - block.start
        assert at == count, (self.names, at, count)
        return found

    def parts(self, config: ModelConfig, shape: tuple[int, ...], box: Box) -> Iterator[tuple[str, Box, Box]]:
        """What fills ``box`` of our tensor of ``shape``: their name, the box there, before transposing, and the box in
        ours."""
        if self._of_experts:
            for e in range(box.start[0], box.stop[0]):
                for name, theirs, ours in self._numbered("{e}", e).parts(config, shape[1:], _without_first(box)):
                    yield name, theirs, Box((e, *ours.start), (e + 1, *ours.stop))
            return
        for at, block in self.rows(config, shape[0]):
            rows = Box((at, *(0,) * (len(shape) - 1)), (at + block.stop - block.start, *shape[1:]))
            common = box.intersect(rows)
            if common is not None:
                yield self.names[block.tensor], common.shifted((block.start - at, *(0,) * (len(shape) - 1))), common

    def their_shapes(self, config: ModelConfig, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shapes of their tensors, by name, for ours of ``shape``."""
        if self._of_experts:
            each = (self._numbered("{e}", e).their_shapes(config, shape[1:]) for e in range(shape[0]))
            return {name: found for shapes in each for name, found in shapes.items()}
        rows = dict.fromkeys(self.names, 0)
        for _, block in self.rows(config, shape[0]):
            name = self.names[block.tensor]
            rows[name] = max(rows[name], block.stop)
        shapes = {name: (count, *shape[1:]) for name, count in rows.items()}
        return {name: found[::-1] if self.transposed else found for name, found in shapes.items()}

    def for_layer(self, number: str) -> TensorSource:
        """The same with the layer's number in the names."""
        return self._numbered("{n}", number)

    @property
    def _of_experts(self) -> bool:
        return "{e}" in self.names[0]

    def _numbered(self, mark: str, number: object) -> TensorSource:
        names = tuple(name.replace(mark, str(number)) for name in self.names)
        return TensorSource(names, self.blocks, self.transposed)


def _without_first(box: Box) -> Box:
    return Box(box.start[1:], box.stop[1:])


def separate_qkv(config: ModelConfig) -> list[RowRange]:
    """Three matrices of queries, keys and values -> group by group the queries, the key and the value."""
    return _qkv(config, (0, 1, 2), (0, 0, 0))


def stacked_qkv(config: ModelConfig) -> list[RowRange]:
    """One matrix of all queries, all keys, all values -> group by group the queries, the key and the value."""
    queries = config.num_attention_heads * config.head_size
    return _qkv(config, (0, 0, 0), (0, queries, queries + config.query_groups * config.head_size))


def gate_and_value(config: ModelConfig) -> list[RowRange]:
    """Two matrices, the gate's and the value's -> one over the other."""
    return [RowRange(0, 0, config.ffn_size), RowRange(1, 0, config.ffn_size)]


def expert_gate_and_value(config: ModelConfig) -> list[RowRange]:
    """As ``gate_and_value``, of one expert."""
    return [RowRange(0, 0, config.expert_ffn_size), RowRange(1, 0, config.expert_ffn_size)]


def shared_gate_and_value(config: ModelConfig) -> list[RowRange]:
    """As ``gate_and_value``, of the shared experts."""
    width = config.moe_shared_expert_intermediate_size or 0
    return [RowRange(0, 0, width), RowRange(1, 0, width)]


def _qkv(config: ModelConfig, tensors: tuple[int, int, int], offsets: tuple[int, int, int]) -> list[RowRange]:
    d = config.head_size
    sizes = (config.num_attention_heads // config.query_groups * d, d, d)
    return [
        RowRange(tensor, offset + group * size, offset + (group + 1) * size)
        for group in range(config.query_groups)
        for tensor, offset, size in zip(tensors, offsets, sizes, strict=True)
    ]
