"""Losses that layers add to the model's: gradients travel with the activations', values are kept for the report.

The gradient of an auxiliary loss is attached to the activations that pass through the layer, so that it arrives in the
backward pass that they have anyway: on any stage, in any schedule, and once where activations are recomputed. Source:
Megatron Core's ``MoEAuxLossAutoScaler``, whose factor is a class attribute; here it is a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megatron_core.errors import LayoutError

Unit = Literal["tokens", "sequences", "counted"]


@dataclass
class AuxiliaryLosses:
    """The auxiliary losses of one step on this rank, of all its layers and micro-batches.

    A loss states its rule: its value is a sum over ``"tokens"``, over ``"sequences"``, or over what ``counts`` has for
    its name (``"counted"``), and the mean over those of the whole global batch is what is minimised and reported. So it
    depends neither on the layout nor on the number of micro-batches, as the loss of the model itself.
    """

    names: tuple[str, ...]
    """Those of the whole model: ``layer_spec.auxiliary_loss_names``."""
    sequences: int
    """Sequences in the global batch."""
    tokens: Tensor | None = None
    """Tokens of the global batch whose loss counts, at least 1: a float64 scalar, set before the first forward pass."""
    counts: dict[str, Tensor] = field(default_factory=dict)
    """Terms of losses that have neither tokens nor sequences, by name: float64 scalars; those of this rank's
    micro-batches at first, before the first forward pass those of the global batch."""
    loss_scale: float | Tensor = 1.0
    """What all gradients are multiplied by, against underflow in float16."""
    expert_layers: Sequence[int] = ()
    """The numbers of the whole model's layers with experts."""
    num_experts: int = 0
    """Experts in each of them."""
    _values: dict[tuple[str, int, int], tuple[Tensor, bool]] = field(default_factory=dict)
    """By name, layer and micro-batch: the value over its denominator, and whether it is partial. A layer that is
    computed again in backward stores the same value again."""
    _loads: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """By layer and micro-batch."""
    _counts: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """By layer and micro-batch."""

    def of_micro_batch(self, micro: int) -> MicroBatchAuxiliaryLosses:
        """What the forward pass of a micro-batch adds to."""
        return MicroBatchAuxiliaryLosses(self, micro)

    def denominator(self, name: str, per: Unit) -> Tensor | int:
        """How many terms the loss ``name`` has in the global batch."""
        if per == "sequences":
            return self.sequences
        if per == "counted":
            return self.counts[name]
        assert self.tokens is not None, "set before the first forward pass"
        return self.tokens

    def totals(self, device: torch.device, *, owns_loss: bool) -> Tensor:
        """This rank's part of each loss, float64 ``[names]``; their sum over all ranks is the global batch's.

        ``owns_loss``: whether values that the tensor-parallel ranks have in common are counted on this rank.
        """
        total = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        for (name, _, _), (value, partial) in self._values.items():
            if partial or owns_loss:
                total[self.names.index(name)] += value
        return total

    def expert_load(self, device: torch.device) -> Tensor:
        """This rank's part of each layer's load, float64 ``[expert_layers, num_experts + 1]``: how often each expert
        was chosen, and how many of all choices were dropped; the sum over all ranks is the global batch's."""
        total = torch.zeros(len(self.expert_layers), self.num_experts + 1, dtype=torch.float64, device=device)
        for (layer_number, _), load in self._loads.items():
            total[self.expert_layers.index(layer_number)] += load
        return total

    def store_load(self, layer_number: int, micro: int, load: Tensor) -> None:
        """Keep a layer's load by a micro-batch's tokens of this rank, ``[num_experts + 1]`` as in ``expert_load``."""
        self._loads[layer_number, micro] = load

    def counts_so_far(self, layer_number: int, micro: int, counts: Tensor) -> Tensor:
        """``counts`` plus what was given here for the micro-batches before ``micro``."""
        self._counts[layer_number, micro] = counts
        return torch.stack([self._counts[layer_number, m] for m in range(micro + 1)]).sum(0)

    def store(
        self, name: str, layer_number: int, micro: int, value: Tensor, denominator: Tensor | int, *, partial: bool
    ) -> None:
        """Keep ``value / denominator`` for ``totals``."""
        if name not in self.names:
            raise LayoutError(
                f"layer {layer_number} adds the auxiliary loss {name!r}, but the layers' specs name "
                f"auxiliary_losses={list(self.names)}; add the name to LayerSpec.auxiliary_losses"
            )
        if value.dim() or torch.finfo(value.dtype).bits < 32:
            raise LayoutError(
                f"auxiliary loss {name!r} of layer {layer_number} is {list(value.shape)} of {value.dtype}; it has to "
                "be a scalar of torch.float32 or wider, in which the loss scale does not overflow"
            )
        self._values[name, layer_number, micro] = value.detach() / denominator, partial


@dataclass(frozen=True)
class MicroBatchAuxiliaryLosses:
    """The part of a step's ``AuxiliaryLosses`` that one micro-batch adds."""

    step: AuxiliaryLosses
    micro: int

    def add(
        self, hidden: Tensor, name: str, value: Tensor, layer_number: int, coefficient: float, per: Unit, partial: bool
    ) -> Tensor:
        """As ``SequenceContext.add_auxiliary_loss``."""
        denominator = self.step.denominator(name, per)
        self.step.store(name, layer_number, self.micro, value, denominator, partial=partial)
        return _AttachGradient.apply(hidden, value, coefficient * self.step.loss_scale / denominator)

    def add_load(self, layer_number: int, load: Tensor) -> None:
        """As ``AuxiliaryLosses.store_load``."""
        self.step.store_load(layer_number, self.micro, load)

    def counts_so_far(self, layer_number: int, counts: Tensor) -> Tensor:
        """As ``AuxiliaryLosses.counts_so_far``."""
        return self.step.counts_so_far(layer_number, self.micro, counts)


class _AttachGradient(torch.autograd.Function):
    """(hidden, loss) -> hidden, whose backward gives the loss the gradient ``factor``."""

    @staticmethod
    def forward(ctx, hidden, value, factor):
        ctx.gradient = torch.as_tensor(factor, dtype=value.dtype, device=value.device)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad):
        return grad, ctx.gradient, None
