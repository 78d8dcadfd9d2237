"""Losses that layers add to the model's: gradients travel with the activations', values are kept for the report.

The gradient of an auxiliary loss is attached to the activations that pass through the layer, so that it arrives in the
backward pass that they have anyway: on any stage, in any schedule, and once where activations are recomputed. Source:
Megatron Core's ``MoEAuxLossAutoScaler``, whose factor is a class attribute; here it is a value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megatron_core.errors import LayoutError

Unit = Literal["tokens", "sequences"]


@dataclass
class AuxiliaryLosses:
    """The auxiliary losses of one step on this rank, of all its layers and micro-batches.

    A loss states its rule: its value is a sum over ``"tokens"`` or over ``"sequences"``, and the mean over those of the
    whole global batch is what is minimised and reported. So it depends neither on the layout nor on the number of
    micro-batches, as the loss of the model itself.
    """

    names: tuple[str, ...]
    """Those of the whole model: ``layer_spec.auxiliary_loss_names``."""
    sequences: int
    """Sequences in the global batch."""
    tokens: Tensor | None = None
    """Tokens of the global batch whose loss counts, at least 1: a float64 scalar, set before the first forward pass."""
    loss_scale: float = 1.0
    """What all gradients are multiplied by, against underflow in float16."""
    _values: dict[tuple[str, int, int], tuple[Tensor, bool]] = field(default_factory=dict)
    """By name, layer and micro-batch: the value over its denominator, and whether it is partial. A layer that is
    computed again in backward stores the same value again."""

    def of_micro_batch(self, micro: int) -> MicroBatchAuxiliaryLosses:
        """What the forward pass of a micro-batch adds to."""
        return MicroBatchAuxiliaryLosses(self, micro)

    def denominator(self, per: Unit) -> Tensor | int:
        """How many tokens or sequences the global batch has."""
        if per == "sequences":
            return self.sequences
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
        denominator = self.step.denominator(per)
        self.step.store(name, layer_number, self.micro, value, denominator, partial=partial)
        return _AttachGradient.apply(hidden, value, coefficient * self.step.loss_scale / denominator)


class _AttachGradient(torch.autograd.Function):
    """(hidden, loss) -> hidden, whose backward gives the loss the gradient ``factor``."""

    @staticmethod
    def forward(ctx, hidden, value, factor):
        ctx.gradient = torch.as_tensor(factor, dtype=value.dtype, device=value.device)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad):
        return grad, ctx.gradient, None
