"""The matrix products of a linear layer in FP8: y = x W^T, dL/dx = dL/dy W and dL/dW = (dL/dy)^T x.

Each matrix is quantised for each product in the blocks of the recipe along the summed dim. A scale of a whole dim is
that of the whole tensor: its amax is a maximum over the ranks that share the tensor, so that no layout changes a scale.
A tensor of activations is that of one micro-batch.

| recipe | x and dL/dy | W |
|---|---|---|
| tensorwise | the tensor | the tensor |
| delayed | the tensor, amax of previous steps | the same |
| rowwise | each row along the summed dim | the same |
| blockwise | 128 along the summed dim | 128 x 128 |
| mxfp8 | 32 along the summed dim | 32 along the summed dim |

The rows of an expert come from several micro-batches, whose number depends on the layout. Therefore with tensorwise
each of these rows has its own scale, and weight gradients, which sum over rows, are in FP8 only with delayed.

Sources: Micikevicius et al. 2022 (formats, delayed); Liu et al. 2024, DeepSeek-V3, section 3.3 (blockwise); Rouhani et
al. 2023 (mxfp8), with the scales rounded so that nothing is clamped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron_core.features.fp8.casts import (
    COLUMNS,
    E4M3,
    E5M2,
    ROWS,
    WHOLE,
    Blocks,
    Order,
    Quantised,
    block_amax,
    cast_to_fp8,
    lost,
    quantise,
    scale_of,
)
from megatron_core.features.fp8.scaled_product import product
from megatron_core.features.fp8.settings import BLOCK, SMALL_BLOCK, FP8Config
from megatron_core.ops import Backend
from megatron_core.parallel.collectives import all_reduce_, start_gather_sequence
from megatron_core.parallel.groups import ALONE, Group
from megatron_core.parallel.handles import Handle
from megatron_core.tensor_parallel.linear import LinearGradients, MatrixProducts, main_grad_of, parallel_linear
from megatron_core.tensor_parallel.linear_comm import NO_COMM, LinearComm, gather_input, reduced_output

Role = Literal["input", "weight", "grad"]
ROLES: tuple[Role, ...] = ("input", "weight", "grad")
ORDERS: tuple[Order, Order] = ("columns", "rows")
"""Names of layouts whose elements are contiguous along dim 0 and along dim 1."""


class FP8Products(MatrixProducts):
    """The products of one linear layer, with their state: blocks, scales, amax history and counts.

    ``of_input`` and ``of_output`` are the ranks that split its input and output features, ``sequence`` those that split
    sequences; ``by_row``: rows of activations come from several micro-batches.
    """

    def __init__(
        self,
        settings: FP8Config,
        of_input: Group,
        of_output: Group,
        *,
        sequence: Group = ALONE,
        by_row: bool = False,
        backend: Backend = "auto",
    ) -> None:
        self.settings = settings
        self.by_row = by_row
        self.backend = backend
        self.splits: dict[Role, tuple[Group, Group]] = {
            "input": (sequence, of_input),
            "weight": (of_output, of_input),
            "grad": (sequence, of_output),
        }
        """The ranks that share the rows of each matrix, and the ranks that share its columns."""
        recipe = settings.fp8_recipe
        self.is_delayed = recipe == "delayed"
        self.per_tensor = recipe in ("delayed", "tensorwise")
        self.power_of_two = not self.per_tensor
        grad_dtype = E5M2 if settings.fp8_format == "hybrid" else E4M3
        self.dtypes: dict[Role, torch.dtype] = {"input": E4M3, "weight": E4M3, "grad": grad_dtype}
        self.history: Tensor | None = None
        """Largest absolute values ``[steps, 3]`` of input, weight and gradient, latest step first; float32, 0 if there
        was none. Set by ``AmaxHistories``; None: scales are computed from the tensor itself."""
        self.recorded = torch.zeros(len(ROLES))
        """Largest absolute values of this step so far, on this rank."""
        self.weight_is_narrow = False
        """Whether the weight was gathered in FP8, which has already recorded its amax, before rounding."""
        self.counts: Tensor | None = None
        """If counting is on: numbers of clamped, zeroed and all nonzero elements, ``[3, 3]`` by role; float64."""

    def __call__(self, x: Tensor, weight: Any, bias: Tensor | None, comm: LinearComm = NO_COMM) -> Tensor:
        """See ``parallel_linear``."""
        return parallel_linear(x, weight, bias, comm, products=self)

    @property
    def knows_scales(self) -> bool:
        """Whether scales come from earlier steps."""
        return self.is_delayed and self.history is not None

    def multiplies_weight_grad(self) -> bool:
        """Whether weight gradients are computed in FP8."""
        return self.settings.fp8_wgrad and (not self.by_row or self.knows_scales)

    def blocks(self, role: Role, summed: int) -> Blocks:
        """The blocks of a matrix in a product that sums over its dim ``summed``."""
        recipe = self.settings.fp8_recipe
        if self.per_tensor:
            return ROWS if self.by_row and role != "weight" and not self.knows_scales else WHOLE
        if recipe == "rowwise":
            return ROWS if summed == 1 else COLUMNS
        if recipe == "blockwise" and role == "weight":
            return Blocks(BLOCK, BLOCK)
        along = Blocks(1, BLOCK if recipe == "blockwise" else SMALL_BLOCK)
        return along if summed == 1 else along.t()

    def scale(self, role: Role, x: Tensor, blocks: Blocks, *, record: bool = False, sequence: Group = ALONE) -> Tensor:
        """The scales of ``x`` ``[..., R, C]``; ``record``: add its amax to the history; ``sequence``: more ranks that
        share its rows."""
        amax = block_amax(x, blocks, backend=self.backend)
        record = record and not (role == "weight" and self.weight_is_narrow)
        amax = amax.to(torch.promote_types(amax.dtype, torch.float32))
        return self.scale_of_amax(role, amax, blocks, record=record, sequence=sequence)

    def scale_of_amax(
        self, role: Role, amax: Tensor, blocks: Blocks, *, record: bool = False, sequence: Group = ALONE
    ) -> Tensor:
        """As ``scale``, from the amaxes of the matrix's blocks on this rank, which are modified."""
        if record and self.is_delayed and amax.numel():
            self._record(role, amax)
        if self.knows_scales and blocks == WHOLE:
            return self._scale_of_history(role, amax)
        rows, columns = self.splits[role]
        if blocks.rows is None:
            all_reduce_(amax, rows, maximum=True)
            all_reduce_(amax, sequence, maximum=True)
        if blocks.columns is None:
            all_reduce_(amax, columns, maximum=True)
        return scale_of(amax, self.dtypes[role], power_of_two=self.power_of_two)

    def _record(self, role: Role, amax: Tensor) -> None:
        if self.recorded.device != amax.device:
            self.recorded = self.recorded.to(amax.device)
        recorded = self.recorded[ROLES.index(role)]
        recorded.copy_(torch.maximum(recorded, amax.amax().to(recorded.dtype)))

    def _scale_of_history(self, role: Role, amax: Tensor) -> Tensor:
        """Scale from the history: 1 if all amaxes were 0; NaN if ``amax`` is not finite, which must not be clamped."""
        assert self.history is not None
        past = self.history[:, ROLES.index(role)]
        past = past.amax() if self.settings.fp8_amax_compute_algo == "max" else past[0]
        scale = scale_of(past, self.dtypes[role], margin=self.settings.fp8_margin)
        return torch.where(past > 0, scale, torch.ones_like(scale)) + (amax * 0.0).float()

    def quantise(
        self,
        role: Role,
        x: Tensor,
        summed: int,
        scale: Tensor | None = None,
        *,
        record: bool = False,
        both: bool = False,
    ) -> Quantised:
        """``x`` quantised for a product that sums over its dim ``summed``, with ``scale`` or its own.

        Products need matrices that are contiguous along the summed dim: native kernels write this layout, or, with
        ``both`` and blocks that do not depend on the summed dim, both layouts.
        """
        blocks = self.blocks(role, summed)
        dtype = self.dtypes[role]
        order = ORDERS[summed]
        if both and self.keeps_scale(role):
            order = "both"
        with torch.no_grad():
            if scale is None and None not in blocks and not (record and self.is_delayed):
                # Blocks are not shared between ranks.
                quantised = quantise(
                    x, dtype, blocks, power_of_two=self.power_of_two, order=order, backend=self.backend
                )
            else:
                scale = self.scale(role, x, blocks, record=record) if scale is None else scale
                quantised = cast_to_fp8(x, scale, dtype, blocks, order=order, backend=self.backend)
            if self.counts is not None:
                self.counts[ROLES.index(role)] += lost(x, quantised)
        return quantised

    def keeps_scale(self, role: Role) -> bool:
        """Whether the scales of a matrix do not depend on the summed dim."""
        return self.blocks(role, 0) == self.blocks(role, 1)

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, comm: LinearComm, *, training: bool
    ) -> tuple[Tensor, Any]:
        """y, and the scales that backward needs."""
        if comm.gather_sequence and self.per_tensor:
            y, scales = self._output(x, weight, record=training, gather=comm.group)
        else:
            y, scales = self._output(gather_input(x, comm), weight, record=training)
        y = reduced_output(y, comm)
        return (y if bias is None else y + bias), scales

    def gradients(self, weight: nn.Parameter, grad_y: Tensor, saved: Any) -> FP8Gradients:
        """The products of backward, with the scales of ``output``."""
        return FP8Gradients(self, weight, grad_y, saved)

    def _output(
        self, x: Tensor, weight: Tensor, *, record: bool, gather: Group = ALONE
    ) -> tuple[Tensor, dict[Role, Tensor]]:
        """x W^T for ``[..., I]`` and ``[O, I]``, and the scales that backward needs; ``record`` as in ``scale``.

        ``gather``: ranks that hold parts of x along its first dim, which are gathered in FP8 with a common scale.
        """
        flat = x.reshape(-1, x.shape[-1])
        scale = self.scale("input", flat, self.blocks("input", 1), record=record, sequence=gather)
        a = self.quantise("input", flat, 1, scale)
        if gather.size() > 1:
            x, gathering = start_gather_sequence(a.data.view(torch.uint8).reshape(x.shape), gather)
            gathering.wait()
            a = Quantised(x.view(a.data.dtype).reshape(-1, x.shape[-1]), scale, a.blocks)
        b = self.quantise("weight", weight, 1, record=record)
        y = product(a, b.t(), weight.dtype, fast_accumulation=True)
        operands: dict[Role, Quantised] = {"input": a, "weight": b}
        scales = {role: quantised.scale for role, quantised in operands.items() if self.keeps_scale(role)}
        return y.view(*x.shape[:-1], len(weight)), scales


class FP8Gradients(LinearGradients):
    """The gradients of y = x W^T from dL/dy ``[..., O]``; ``scales`` come from ``FP8Products.output``."""

    def __init__(self, fp8: FP8Products, weight: nn.Parameter, grad_y: Tensor, scales: Mapping[Role, Tensor]) -> None:
        super().__init__(weight, grad_y)
        self.fp8 = fp8
        self.scales = scales
        self._rows = grad_y.reshape(-1, grad_y.shape[-1])
        self._quantised: dict[Blocks, Quantised] = {}

    def _grad(self, summed: int) -> Quantised:
        """dL/dy, quantised once if both products use the same blocks."""
        blocks = self.fp8.blocks("grad", summed)
        if blocks not in self._quantised:
            self._quantised[blocks] = self.fp8.quantise(
                "grad", self._rows, summed, record=True, both=self.fp8.multiplies_weight_grad()
            )
        return self._quantised[blocks]

    def of_input(self) -> Tensor:
        """dL/dx ``[..., I]``, this rank's part of the sum over the ranks that split the output."""
        weight = self.fp8.quantise("weight", self.weight.detach(), 0, self.scales.get("weight"))
        return product(self._grad(1), weight, self.grad_y.dtype).view(*self.grad_y.shape[:-1], -1)

    def start_gather(self, x: Tensor, comm: LinearComm) -> tuple[Tensor, Handle]:
        """Start gathering the input; as FP8 bytes if forward has already computed its scale."""
        if comm.gather_sequence and self.fp8.per_tensor and self.fp8.multiplies_weight_grad():
            x = self.fp8.quantise("input", x, 1, self.scales["input"]).data.view(torch.uint8)
        return super().start_gather(x, comm)

    def of_weight(self, x: Tensor) -> Tensor | None:
        """``weight_grad``, in FP8 unless ``fp8_wgrad`` is off."""
        if not self.fp8.multiplies_weight_grad():
            return super().of_weight(x)
        main_grad = main_grad_of(self.weight)
        if main_grad is None:
            return self._of_weight(x, self.weight.dtype)
        main_grad.add_(self._of_weight(x, main_grad.dtype))
        return None

    def _of_weight(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        """dL/dW ``[O, I]`` in ``out_dtype`` from ``x`` ``[..., I]`` or its FP8 bytes."""
        if x.dtype == torch.uint8:
            data = x.view(self.fp8.dtypes["input"]).reshape(-1, x.shape[-1])
            quantised = Quantised(data, self.scales["input"], WHOLE)
        else:
            quantised = self.fp8.quantise("input", x.reshape(-1, x.shape[-1]), 0, self.scales.get("input"))
        return product(self._grad(0).t(), quantised, out_dtype)
