"""Low-rank adapters of linear layers, split over ranks as the layer's weight is.

Source: Hu et al. 2021 (arXiv 2106.09685); Kalajdzievski 2023 (2312.03732) for the rank-stabilised factor; Liu et al.
2024 (2402.09353), equation 5, for DoRA.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron_core.features.experts.grouped_linear import grouped_linear
from megatron_core.features.lora.settings import TuningConfig
from megatron_core.parallel.collectives import (
    all_reduce_,
    copy_to_region,
    gather_from_sequence,
    reduce_from_region,
    reduce_scatter_to_sequence,
)
from megatron_core.parallel.groups import Group
from megatron_core.parallel.initialization import Normal
from megatron_core.parallel.sharding import Range, Split, allocate, spec_of

Side = Literal["outputs", "inputs"]
Product = Callable[[Tensor], Tensor]
"""x -> W x of the layer, with its communication."""


class LoRA(nn.Module):
    """y = W x + s B A x for a frozen weight W ``[O, I]``, or for each expert's ``[E, O, I]``.

    A fused weight may have an adapter for each of its matrices: A ``[r, I]``, B ``[O_p, r]`` for the rows
    ``rows_of_parts[p]``. A is split as the inputs of W are, B as its outputs; on the axis ``axis`` along which W is not
    split on their side they are replicated, and with ``partial`` each rank computes a part of their gradients (sequence
    parallelism, experts). B starts at zero; A at N(0, 1 / (3 I)), the variance of peft's uniform distribution. With
    DoRA, y = m (W x + s B A x) / n with the trained m ``[O_p]`` and the norms n of the rows of W + s B A, which count
    as constants.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        rows_of_parts: Mapping[str, Sequence[Range]],
        settings: TuningConfig,
        *,
        group: Group,
        axis: str = "tp",
        sequence_parallel: bool = False,
        dropout: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        assert settings.lora_rank is not None, "there are adapters"
        rank = settings.lora_rank
        spec = spec_of(weight)
        self.scale = settings.lora_scale
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.is_expert = weight.dim() == 3
        self.enabled = True
        self.dropout = dropout
        lead = spec.global_shape[:-2]
        out_dim = len(lead)
        inputs = spec.global_shape[-1]
        of_lead = tuple(split for split in spec.splits if split.dim < len(lead))
        of_inputs = tuple(split for split in spec.splits if split.dim == out_dim + 1)
        of_outputs = tuple(split for split in spec.splits if split.dim == out_dim)
        self.side: Side | None = "outputs" if of_outputs else None
        if of_inputs:
            self.side = "inputs"
        partial = sequence_parallel or self.is_expert

        def make(shape: tuple[int, ...], splits: tuple[Split, ...], method: object) -> nn.Parameter:
            is_replicated = axis not in (split.axis for split in splits)
            # Each rank computes the part of a replicated matrix's gradient that belongs to its tokens or its experts.
            partial_axes = (axis,) if is_replicated and partial else ()
            of_matrix = replace(spec, global_shape=shape, splits=splits, partial_axes=partial_axes, fused=None)
            parameter: Any = allocate(of_matrix, weight.dtype, weight.device)
            parameter.init_method = method
            return parameter

        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()
        self.magnitude = nn.ParameterDict()
        self._rows: list[Tensor] = []
        local_ranges: Sequence[Range] = ((0, spec.global_shape[out_dim]),)
        if of_outputs:
            local_ranges = of_outputs[0].ranges[dict(spec.indices)[axis]]
        for name, rows in rows_of_parts.items():
            count = sum(stop - start for start, stop in rows)
            splits = tuple(_selected(split, rows) for split in of_outputs)
            self._rows.append(_local_rows(local_ranges, rows))
            self.lora_A[name] = make((*lead, rank, inputs), (*of_lead, *of_inputs), Normal((3 * inputs) ** -0.5))
            of_rows = tuple(replace(split, dim=len(lead)) for split in splits)
            self.lora_B[name] = make((*lead, count, rank), (*of_lead, *of_rows), nn.init.zeros_)
            if settings.use_dora:
                self.magnitude[name] = make((count,), tuple(replace(split, dim=0) for split in splits), nn.init.zeros_)
        self.requires_grad_()

    def forward(self, x: Tensor, product: Product, weight: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Return the layer's output without its bias; ``product(x)`` is W x, ``counts`` are the rows of each expert."""
        y = product(x)
        if not self.enabled:
            return y
        dropped = x if self.dropout is None else self.dropout(x)
        if self.is_expert:
            assert counts is not None, "rows of experts are counted"
            inner = grouped_linear(dropped, self._a(), counts)  # type: ignore[arg-type]
            return y + self.scale * grouped_linear(inner, self._b(weight), counts)  # type: ignore[arg-type]
        inner = self._exchanged(nn.functional.linear(dropped, self._a()))
        added = self.scale * nn.functional.linear(inner, self._b(weight))
        if not self.magnitude:
            return y + added
        again = y if dropped is x else product(dropped)
        factor = self._row_factor(weight)
        return y + (factor - 1) * again + factor * added

    def merged(self, weight: Tensor) -> Tensor:
        """The weight W' ``[O, I]`` of this rank whose product is the layer's output."""
        changed = weight + self.scale * self._b(weight) @ self._a()
        return changed * self._row_factor(weight).unsqueeze(-1) if self.magnitude else changed

    @torch.no_grad()
    def initial_magnitudes(self, weight: Tensor) -> dict[nn.Parameter, Tensor]:
        """The norms of the rows of W + s B A, at which DoRA's magnitudes start."""
        norms = self._norms(weight)
        return {parameter: norms[rows] for parameter, rows in zip(self.magnitude.values(), self._rows, strict=False)}

    def _a(self) -> Tensor:
        matrices = list(self.lora_A.values())
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim=-2)

    def _b(self, weight: Tensor) -> Tensor:
        """B of all parts, ``[O, parts * r]``: each part has its own rows and columns."""
        matrices = list(self.lora_B.values())
        if len(matrices) == 1 and matrices[0].shape[-2] == weight.shape[-2]:
            return matrices[0]
        rank = matrices[0].shape[-1]
        columns = []
        for matrix, rows in zip(matrices, self._rows, strict=True):
            empty = matrix.new_zeros(*weight.shape[:-1], rank)
            columns.append(empty.index_copy(-2, rows.to(matrix.device), matrix))
        return torch.cat(columns, dim=-1)

    def _exchanged(self, inner: Tensor) -> Tensor:
        """A x, completed for the product with B: summed if the inputs are split, and split as the output."""
        if self.side == "inputs":
            combine = reduce_scatter_to_sequence if self.sequence_parallel else reduce_from_region
            return combine(inner, self.group)
        if self.side == "outputs":
            return (gather_from_sequence if self.sequence_parallel else copy_to_region)(inner, self.group)
        return inner

    @torch.no_grad()
    def _norms(self, weight: Tensor) -> Tensor:
        """The norms of the rows of W + s B A ``[O]``."""
        changed = weight + self.scale * self._b(weight) @ self._a()
        squares = changed.to(torch.promote_types(changed.dtype, torch.float32)).square().sum(-1)
        if self.side == "inputs" and self.group.size() > 1:
            all_reduce_(squares, self.group)
        return squares.sqrt().to(weight.dtype)

    def _row_factor(self, weight: Tensor) -> Tensor:
        """m / n of each row ``[O]``; 1 for rows without an adapter."""
        norms = self._norms(weight)
        factor = torch.ones_like(weight[:, 0])
        for magnitude, rows in zip(self.magnitude.values(), self._rows, strict=True):
            rows = rows.to(weight.device)
            factor = factor.index_copy(0, rows, magnitude / norms[rows])
        return factor


def _selected(split: Split, rows: Sequence[Range]) -> Split:
    """The split of the matrix that consists of ``rows`` of another one with ``split``."""
    ranges = (tuple(piece for local in of_rank for piece in _positions(local, rows)) for of_rank in split.ranges)
    return replace(split, ranges=tuple(ranges))


def _positions(local: Range, rows: Sequence[Range]) -> list[Range]:
    """The positions among ``rows`` of the rows ``local``, as few ranges.

    Ranges are not joined beyond ``local``, which other ranks may share.
    """
    ranges: list[Range] = []
    position = 0
    for start, stop in rows:
        low = position + max(local[0], start) - start
        high = position + min(local[1], stop) - start
        if low < high and ranges and ranges[-1][1] == low:
            ranges[-1] = ranges[-1][0], high
        elif low < high:
            ranges.append((low, high))
        position += stop - start
    return ranges


def _local_rows(local: Sequence[Range], rows: Sequence[Range]) -> Tensor:
    """Indices of ``rows`` in the local tensor of a rank that holds ``local``, in its order."""
    indices: list[int] = []
    offset = 0
    for first, end in local:
        for start, stop in rows:
            indices += range(offset + max(first, start) - first, offset + min(end, stop) - first)
        offset += end - first
    return torch.tensor(indices, dtype=torch.int64)
