"""Correspondence between the rows of a tensor of ours and the tensors of a Hugging Face checkpoint."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.parallel.boxes import Box


@dataclass(frozen=True)
class RowRange:
    """A range of rows of one stored tensor; a list of them in order makes up the rows of our tensor."""

    tensor: int
    """Index into ``TensorSource.names``."""
    start: int
    stop: int
    step: int = 1
    """Distance of the stored rows, for matrices whose rows alternate."""

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(range(self.start, self.stop, self.step))

    def rows(self, first: int, stop: int) -> slice:
        """The stored rows ``first`` to ``stop`` - 1 of the range."""
        start = self.start + first * self.step
        return slice(start, start + (stop - first - 1) * self.step + 1, self.step)


Index = tuple[slice, ...]
RowRanges = Callable[[ModelConfig, int], list[RowRange]]
"""The model's configuration and the number of rows of our tensor -> the stored rows in our order."""


@dataclass(frozen=True)
class TensorSource:
    """The stored tensors that hold one of ours: import reads these row ranges, export writes them.

    With ``{e}`` in the names, our tensor stacks the matrices of all experts, ``[E, out, in]``, and each expert has its
    own stored tensors.
    """

    names: tuple[str, ...]
    rows: RowRanges | None = None
    """None: one stored tensor with the rows of ours in the same order."""
    transposed: bool = False
    """Whether matrices are stored as ``[in, out]``; vectors are not affected."""
    stacked: bool = False
    """Whether the stored tensors, too, stack those of all experts along their first dim."""
    ones: tuple[int, int] = (0, 0)
    """Numbers of dims of one element that a stored vector has before and after its own."""
    by_head: bool = False
    """Whether a vector of all heads is stored as ``[heads, channels]``; with ``{h}`` in the name, one for each head."""

    layer_number: int = 0
    """The layer, from 0, whose sizes the rows depend on."""

    def parts(self, config: ModelConfig, shape: tuple[int, ...], box: Box) -> Iterator[tuple[str, Index, Box]]:
        """Split ``box`` of our tensor of ``shape``: stored name, index in the stored tensor (before transposing), box
        in ours."""
        if self.stacked or self._has_experts:
            inner = Box(box.start[1:], box.stop[1:])
            for e in range(box.start[0], box.stop[0]):
                before = (slice(e, e + 1),) if self.stacked else ()
                for name, stored, ours in self.of_expert(e).parts(config, shape[1:], inner):
                    yield name, (*before, *stored), Box((e, *ours.start), (e + 1, *ours.stop))
            return
        if self.by_head:
            yield from self._heads(config.head_size, box)
            return
        zeros = (0,) * (len(shape) - 1)
        for row, block in self._placed(config, shape[0]):
            rows = Box((row, *zeros), (row + block.count, *shape[1:]))
            common = box.intersect(rows)
            if common is not None:
                stored_rows = block.rows(common.start[0] - row, common.stop[0] - row)
                leading, trailing = ([slice(0, 1)] * count for count in self.ones)
                yield self.names[block.tensor], (*leading, stored_rows, *common.index[1:], *trailing), common

    def _heads(self, channels: int, box: Box) -> Iterator[tuple[str, Index, Box]]:
        """The same for a vector that is stored by heads."""
        for start in range(box.start[0] // channels * channels, box.stop[0], channels):
            common = box.intersect(Box((start,), (start + channels,)))
            if common is not None:
                head = start // channels
                of_head = slice(common.start[0] - start, common.stop[0] - start)
                leading = () if self.of_heads else (slice(head, head + 1),)
                yield self.names[0].replace("{h}", str(head)), (*leading, of_head), common

    def stored_shapes(self, config: ModelConfig, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shapes of the stored tensors by name, for our tensor of ``shape``."""
        if self.stacked:
            return {
                name: (shape[0], *stored_shape)
                for name, stored_shape in self.of_expert(0).stored_shapes(config, shape[1:]).items()
            }
        if self._has_experts:
            expert_shapes = (self.of_expert(e).stored_shapes(config, shape[1:]) for e in range(shape[0]))
            return {name: stored_shape for shapes in expert_shapes for name, stored_shape in shapes.items()}
        if self.of_heads:
            heads = range(shape[0] // config.head_size)
            return {self.names[0].replace("{h}", str(head)): (config.head_size,) for head in heads}
        if self.by_head:
            return {self.names[0]: (shape[0] // config.head_size, config.head_size)}
        rows: dict[str, int] = {}  # a model may have only some of the tensors
        for _, block in self._placed(config, shape[0]):
            name = self.names[block.tensor]
            rows[name] = max(rows.get(name, 0), block.rows(0, block.count).stop)
        before, after = ((1,) * count for count in self.ones)
        shapes = {name: (*before, count, *shape[1:], *after) for name, count in rows.items()}
        return {name: stored_shape[::-1] if self.transposed else stored_shape for name, stored_shape in shapes.items()}

    def rows_by_name(self, config: ModelConfig, count: int) -> dict[str, list[int]]:
        """For each stored tensor, the rows of ours, of ``count`` rows, that it holds, in its order."""
        rows_of: dict[str, dict[int, int]] = {name: {} for name in self.names}
        for row, block in self._placed(config, count):
            rows = enumerate(range(block.start, block.stop, block.step), row)
            rows_of[self.names[block.tensor]] |= {stored: ours for ours, stored in rows}
        return {name: [rows[stored] for stored in range(len(rows))] for name, rows in rows_of.items()}

    def turned(self, tensor: Tensor) -> Tensor:
        """A stored tensor, or part of one, as ours and the reverse: matrices are transposed if they are stored so."""
        if self.of_heads:
            return tensor
        if any(self.ones) or self.by_head:
            before, after = ((1,) * count for count in ((1, 0) if self.by_head else self.ones))
            return tensor.flatten() if tensor.dim() > 1 else tensor.view(*before, -1, *after)
        return tensor.transpose(-1, -2) if self.transposed and tensor.dim() - self.stacked == 2 else tensor

    def turned_index(self, index: Index) -> Index:
        """The index of ``parts`` in the stored tensor."""
        if self.transposed and len(index) - self.stacked == 2:
            return (*index[:-2], index[-1], index[-2])
        return index

    def renamed(self, prefix: str, suffix: str, layer_number: int) -> "TensorSource":
        """The same rows of tensors of a layer, with longer names."""
        return replace(self, names=tuple(f"{prefix}{name}{suffix}" for name in self.names), layer_number=layer_number)

    def _placed(self, config: ModelConfig, count: int) -> list[tuple[int, RowRange]]:
        """The row ranges, each with its first row in our tensor of ``count`` rows."""
        ranges = [RowRange(0, 0, count)] if self.rows is None else self.rows(config.of_layer(self.layer_number), count)
        placed = []
        row = 0
        for rows in ranges:
            placed.append((row, rows))
            row += rows.count
        assert row == count, (self.names, row, count)
        return placed

    @property
    def _has_experts(self) -> bool:
        return "{e}" in self.names[0]

    @property
    def of_heads(self) -> bool:
        """Whether a vector of all heads is stored as one vector for each head."""
        return "{h}" in self.names[0]

    def of_expert(self, e: int) -> "TensorSource":
        """The stored tensors of one expert; of stacked ones, the part of one expert."""
        return replace(self, names=tuple(name.replace("{e}", str(e)) for name in self.names), stacked=False)


def gate_and_up(gate: str, up: str) -> TensorSource:
    """Separate gate and up projections; ours has the gate's rows first."""
    return TensorSource((gate, up), lambda _, count: [RowRange(0, 0, count // 2), RowRange(1, 0, count // 2)])


def alternating_gate_and_up(name: str) -> TensorSource:
    """Gate and up projections of all experts whose stored output features alternate, ``[E, in, 2 ffn]``."""
    return TensorSource(
        (name,), lambda _, count: [RowRange(0, first, count, 2) for first in (0, 1)], transposed=True, stacked=True
    )


def separate_qkv(query: str, key: str, value: str) -> TensorSource:
    """Separate projections of queries, keys and values; ours has the queries, key and value of each group in turn."""
    return TensorSource((query, key, value), lambda config, _: _qkv_rows(config, (0, 1, 2), (0, 0, 0)))


def stacked_qkv(name: str, *, transposed: bool = False) -> TensorSource:
    """One projection with all queries, then all keys, then all values; ours as for ``separate_qkv``."""

    def rows(config: ModelConfig, _: int) -> list[RowRange]:
        queries = config.num_attention_heads * config.head_size
        return _qkv_rows(config, (0, 0, 0), (0, queries, queries + config.query_groups * config.head_size))

    return TensorSource((name,), rows, transposed)


def of_each_head(name: str) -> TensorSource:
    """A vector of all heads that is stored as ``[heads, channels]``; with ``{h}`` in the name, one for each head."""
    return TensorSource((name,), by_head=True)


def transposed(name: str) -> TensorSource:
    """A matrix that is stored as ``[in, out]``."""
    return TensorSource((name,), transposed=True)


def _qkv_rows(config: ModelConfig, tensors: tuple[int, int, int], offsets: tuple[int, int, int]) -> list[RowRange]:
    d = config.head_size
    sizes = (config.num_attention_heads // config.query_groups * d, d, d)
    return [
        RowRange(tensor, offset + group * size, offset + (group + 1) * size)
        for group in range(config.query_groups)
        for tensor, offset, size in zip(tensors, offsets, sizes, strict=True)
    ]
