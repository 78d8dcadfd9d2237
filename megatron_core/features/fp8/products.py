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

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from megatron_core.features.fp8 import casts
from megatron_core.features.fp8.native_casts import Order, amaxes_of_list
from megatron_core.features.fp8.scaled_product import add_product_, product
from megatron_core.features.fp8.settings import BLOCK, SMALL_BLOCK, FP8Config
from megatron_core.ops import Backend
from megatron_core.ops.backend import select_backend
from megatron_core.parallel.collectives import all_reduce_, start_gather_sequence
from megatron_core.parallel.groups import ALONE, Group
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
        grad_dtype = casts.E5M2 if settings.fp8_format == "hybrid" else casts.E4M3
        self.dtypes: dict[Role, torch.dtype] = {"input": casts.E4M3, "weight": casts.E4M3, "grad": grad_dtype}
        self.history: Tensor | None = None
        """Largest absolute values ``[steps, 3]`` of input, weight and gradient, latest step first; float32, 0 if there
        was none. Set by ``AmaxHistories``; None: scales are computed from the tensor itself."""
        self.known_scales: tuple[Tensor, Tensor] | None = None
        """Scales ``[3]`` of the roles from ``history``, and their inverses; None: computed at their first use."""
        self.recorded = torch.zeros(len(ROLES))
        """Largest absolute values of this step so far, on this rank."""
        self.weight_is_narrow = False
        """Whether the weight was gathered in FP8, which has already recorded its amax, before rounding."""
        self.keeps_weight = False
        """Whether weights stay equal until this is set again, so that each is quantised once for all micro-batches."""
        self._kept_weight: dict[int, casts.Quantised] = {}
        self.weight_amax: Tensor | None = None
        """The amax of the weight in this step, if one launch finds those of all layers of ``unit``."""
        self.unit: Mapping[FP8Products, Any] = {}
        """The linear layers whose weights are gathered together, if they share the launch that finds their amaxes."""
        self.counts: Tensor | None = None
        """If counting is on: numbers of clamped, zeroed and all nonzero elements, ``[3, 3]`` by role; float64."""

    def __call__(self, x: Tensor, weight: Any, bias: Tensor | None, comm: LinearComm = NO_COMM) -> Tensor:
        """See ``parallel_linear``."""
        return parallel_linear(x, weight, bias, comm, products=self)

    @property
    def knows_scales(self) -> bool:
        """Whether scales come from earlier steps."""
        return self.is_delayed and self.history is not None

    def keep_weight(self, *, wanted: bool) -> None:
        """Drop the quantised weight; ``wanted``: keep the next one until the next call, for all its products."""
        self.keeps_weight = wanted
        self._kept_weight = {}
        self.weight_amax = None

    def multiplies_weight_grad(self) -> bool:
        """Whether weight gradients are computed in FP8."""
        return self.settings.fp8_wgrad and (not self.by_row or self.knows_scales)

    def blocks(self, role: Role, summed: int) -> casts.Blocks:
        """The blocks of a matrix in a product that sums over its dim ``summed``."""
        recipe = self.settings.fp8_recipe
        if self.per_tensor:
            return casts.ROWS if self.by_row and role != "weight" and not self.knows_scales else casts.WHOLE
        if recipe == "rowwise":
            return casts.ROWS if summed == 1 else casts.COLUMNS
        if recipe == "blockwise" and role == "weight":
            return casts.Blocks(BLOCK, BLOCK)
        along = casts.Blocks(1, BLOCK if recipe == "blockwise" else SMALL_BLOCK)
        return along if summed == 1 else along.t()

    def scale_of_amax(self, role: Role, amax: Tensor, blocks: casts.Blocks, *, record: bool = False) -> Tensor:
        """The scales from the amaxes of the matrix's blocks on this rank, which are modified."""
        self._change_amax(role, record=record)(amax, blocks)
        if self.knows_scales and blocks == casts.WHOLE:
            # An amax that is not finite makes the scale NaN: clamping must not hide it.
            return self._scales_of_history(role).scale + (amax * 0.0).float()
        return casts.scale_of(amax, self.dtypes[role], power_of_two=self.power_of_two)

    def _change_amax(
        self, role: Role, *, record: bool, sequence: Group = ALONE
    ) -> Callable[[Tensor, casts.Blocks], None]:
        """The function that records amaxes and takes their maximum over the ranks that share the matrix.

        ``sequence``: more ranks that share its rows.
        """
        rows, columns = self.splits[role]

        def change(amax: Tensor, blocks: casts.Blocks) -> None:
            if record and self.is_delayed and amax.numel():
                recorded = self._recorded_of(role, amax.device)
                recorded.copy_(torch.maximum(recorded, amax.amax().to(recorded.dtype)))
            if self.knows_scales and blocks == casts.WHOLE:
                return
            if blocks.rows is None:
                all_reduce_(amax, rows, maximum=True)
                all_reduce_(amax, sequence, maximum=True)
            if blocks.columns is None:
                all_reduce_(amax, columns, maximum=True)

        return change

    def _recorded_of(self, role: Role, device: torch.device) -> Tensor:
        if self.recorded.device != device:
            self.recorded = self.recorded.to(device)
        return self.recorded[ROLES.index(role)]

    def _scales_of_history(self, role: Role) -> casts.Scales:
        if self.known_scales is None:
            assert self.history is not None
            self.known_scales = self.scales_of(self.history)
        scales, inverses = self.known_scales
        return casts.Scales(scales[ROLES.index(role)], inverses[ROLES.index(role)])

    def scales_of(self, histories: Tensor) -> tuple[Tensor, Tensor]:
        """Scales ``[..., 3]`` from histories ``[..., steps, 3]``, and their inverses; 1 if all amaxes were 0."""
        past = histories.amax(-2) if self.settings.fp8_amax_compute_algo == "max" else histories[..., 0, :]
        margin = self.settings.fp8_margin
        by_role = [casts.scale_of(past[..., i], self.dtypes[role], margin=margin) for i, role in enumerate(ROLES)]
        scales = torch.stack(by_role, dim=-1)
        scales = torch.where(past > 0, scales, torch.ones_like(scales))
        return scales, scales.reciprocal()

    def quantise(
        self,
        role: Role,
        x: Tensor,
        *sums: int,
        scales: casts.Scales | None = None,
        record: bool = False,
        sequence: Group = ALONE,
        amax: Tensor | None = None,
    ) -> list[casts.Quantised]:
        """``x`` quantised for each product that sums over a dim of ``sums``, with ``scales`` or its own.

        Products need matrices that are contiguous along the summed dim: native kernels write these layouts in one
        launch. ``record``: add the amax to the history; ``sequence``: more ranks that share the rows of ``x``.
        """
        orders = {ORDERS[summed]: self.blocks(role, summed) for summed in sums}
        dtype = self.dtypes[role]
        record = record and not (role == "weight" and self.weight_is_narrow)
        quantised: Mapping[Order, casts.Quantised]
        with torch.no_grad():
            if scales is not None:
                quantised = {
                    order: casts.cast_to_fp8(x, scales, dtype, blocks, order=order, backend=self.backend)
                    for order, blocks in orders.items()
                }
            elif self.knows_scales and set(orders.values()) == {casts.WHOLE}:
                place = self._recorded_of(role, x.device) if record else None
                known = self._scales_of_history(role)
                quantised = casts.cast_recording(x, known, dtype, list(orders), place, backend=self.backend)
            else:
                groups = (*self.splits[role], sequence)
                is_changed = (record and self.is_delayed) or any(group.size() > 1 for group in groups)
                adapt = self._change_amax(role, record=record, sequence=sequence) if is_changed else None
                quantised = casts.quantise_orders(
                    x, dtype, orders, power_of_two=self.power_of_two, backend=self.backend, change_amax=adapt, amax=amax
                )
            if self.counts is not None:
                # Statistics are per cast for a product; both orders of one cast have the same numbers or own scales.
                for numbers in {id(result.scale): result for result in quantised.values()}.values():
                    self.counts[ROLES.index(role)] += casts.lost(x, numbers)
        return [quantised[ORDERS[summed]] for summed in sums]

    def quantised_weight(self, weight: Tensor, *, training: bool) -> dict[int, casts.Quantised]:
        """The weight for the product over its dim 1, and for that over dim 0 if it is kept for a whole step."""
        if self._kept_weight:
            return self._kept_weight
        # Without a gradient nothing is recorded, so that the next forward must quantise again.
        keeps = self.keeps_weight and training
        sums = (1, 0) if keeps else (1,)
        if keeps and self.weight_amax is None and len(self.unit) > 1:
            find_weight_amaxes(self.unit)
        amax = self.weight_amax if keeps else None
        quantised = dict(zip(sums, self.quantise("weight", weight, *sums, record=training, amax=amax), strict=True))
        if keeps:
            self._kept_weight = quantised
        return quantised

    def keeps_scale(self, role: Role) -> bool:
        """Whether the scales of a matrix do not depend on the summed dim."""
        return self.blocks(role, 0) == self.blocks(role, 1)

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, comm: LinearComm, *, training: bool
    ) -> tuple[Tensor, Tensor, Any]:
        """y, the input for backward, in FP8 where possible, and the scales of the operands."""
        gathers_bytes = comm.gather_sequence and self.per_tensor
        full = x if gathers_bytes else gather_input(x, comm)
        # Only this layer reads its input in backward, so that one byte takes the place of two; but an input that is
        # gathered again there must not be kept whole.
        keeps_input = training and weight.requires_grad and self.multiplies_weight_grad()
        sums = (1, 0) if keeps_input and not comm.gather_sequence else (1,)
        flat = full.reshape(-1, full.shape[-1])
        gather = comm.group if gathers_bytes else ALONE
        a, *columns = self.quantise("input", flat, *sums, record=training, sequence=gather)
        saved_x = x
        input_scales = a.scales if self.keeps_scale("input") else None
        if columns:
            saved_x = columns[0].data.mT.view(torch.uint8)
            input_scales = columns[0].scales
        shape = full.shape
        if gathers_bytes:
            shard = a.data.view(torch.uint8).reshape(x.shape)
            saved_x = shard if keeps_input else x
            gathered, gathering = start_gather_sequence(shard, gather)
            gathering.wait()
            shape = gathered.shape
            a = casts.Quantised(gathered.view(a.data.dtype).flatten(0, -2), a.scale, a.blocks, a.known_inverse)
        matrices = self.quantised_weight(weight, training=training)
        y = product(a, matrices[1].t(), weight.dtype, fast_accumulation=True).view(*shape[:-1], len(weight))
        y = reduced_output(y, comm)
        weight_scales = matrices[1].scales if self.keeps_scale("weight") else None
        saved = SavedOperands(input_scales, bool(columns), weight_scales, matrices.get(0))
        return (y if bias is None else y + bias), saved_x, saved

    def gradients(self, weight: nn.Parameter, grad_y: Tensor, saved: Any) -> "FP8Gradients":
        """The products of backward, with the scales of ``output``."""
        return FP8Gradients(self, weight, grad_y, saved)


def find_weight_amaxes(unit: Mapping[FP8Products, Any]) -> None:
    """Find the amaxes of the weights of linear layers in one launch, if a GPU has the native kernel."""
    weights = [linear.weight.detach() for linear in unit.values()]
    backend = next(iter(unit)).backend
    if weights[0].is_cuda and select_backend("fp8", backend, "cuda", weights[0].dtype) == "native":
        for products, amax in zip(unit, amaxes_of_list(weights), strict=True):
            products.weight_amax = amax


class SavedOperands(NamedTuple):
    """Data of the matrices of forward for backward, in addition to the saved input."""

    input_scales: casts.Scales | None
    """Scales of the saved input, or, if it is not in FP8, scales that do not depend on the summed dim."""
    is_turned: bool
    """Whether the saved input is the transposed matrix in FP8."""
    weight_scales: casts.Scales | None
    """Scales of the weight that do not depend on the summed dim."""
    weight: casts.Quantised | None
    """The weight for dL/dx, if it is kept."""


class FP8Gradients(LinearGradients):
    """The gradients of y = x W^T from dL/dy ``[..., O]``; ``saved`` comes from ``FP8Products.output``."""

    def __init__(self, fp8: FP8Products, weight: nn.Parameter, grad_y: Tensor, saved: SavedOperands) -> None:
        super().__init__(weight, grad_y)
        self.fp8 = fp8
        self.saved = saved
        self._rows = grad_y.reshape(-1, grad_y.shape[-1])
        self._quantised: dict[int, casts.Quantised] = {}

    def _grad(self, summed: int) -> casts.Quantised:
        """dL/dy, quantised once for both products."""
        if summed not in self._quantised:
            is_first = not self._quantised
            needs_both = is_first and self.fp8.multiplies_weight_grad() and self.weight.requires_grad
            sums = (1, 0) if needs_both else (summed,)
            matrices = self.fp8.quantise("grad", self._rows, *sums, record=is_first)
            self._quantised |= dict(zip(sums, matrices, strict=True))
        return self._quantised[summed]

    def of_input(self) -> Tensor:
        """dL/dx ``[..., I]``, this rank's part of the sum over the ranks that split the output."""
        weight = self.saved.weight
        if weight is None:
            (weight,) = self.fp8.quantise("weight", self.weight.detach(), 0, scales=self.saved.weight_scales)
        return product(self._grad(1), weight, self.grad_y.dtype).view(*self.grad_y.shape[:-1], -1)

    def of_weight(self, x: Tensor) -> Tensor | None:
        """``weight_grad``, in FP8 unless ``fp8_wgrad`` is off."""
        if not self.fp8.multiplies_weight_grad():
            return super().of_weight(x)
        main_grad = main_grad_of(self.weight)
        if main_grad is None:
            return product(*self._factors(x), self.weight.dtype)
        # torch's products in FP8 cannot add to a matrix, unlike those in 16 bits.
        add_product_(main_grad, *self._factors(x))
        return None

    def _factors(self, x: Tensor) -> tuple[casts.Quantised, casts.Quantised]:
        """The factors of dL/dW ``[O, I]``, from the saved ``[..., I]``, its FP8 bytes, or those of ``[I, R]``."""
        scales = self.saved.input_scales
        dtype = self.fp8.dtypes["input"]
        if x.dtype != torch.uint8:
            (quantised,) = self.fp8.quantise("input", x.reshape(-1, x.shape[-1]), 0, scales=scales)
            return self._grad(0).t(), quantised
        assert scales is not None, "the input was saved in FP8, with its scales"
        data = x.view(dtype).mT if self.saved.is_turned else x.reshape(-1, x.shape[-1]).view(dtype)
        return self._grad(0).t(), casts.Quantised(data, scales.scale, self.fp8.blocks("input", 0), scales.inverse)
