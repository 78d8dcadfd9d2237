"""Auxiliary losses of layers: attach their gradients to the activations and store their values for logging.

The backward of an activation also backpropagates the auxiliary loss attached to it. This works on any stage and in any
schedule, and counts once if activations are recomputed. Source: Megatron Core's ``MoEAuxLossAutoScaler``, whose factor
is a class attribute; here it is a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megatron_core.errors import LayoutError

Unit = Literal["tokens", "sequences", "counted"]


@dataclass
class AuxiliaryLosses:
    """The auxiliary losses of one step for all layers and micro-batches of this rank.

    The value of a loss is a sum over ``"tokens"``, ``"sequences"`` or ``"counted"`` terms, whose number is in
    ``counts`` under the name of the loss. The mean over the global batch is minimised and logged. Like the loss of the
    model, it depends neither on the layout nor on the number of micro-batches.
    """

    names: tuple[str, ...]
    """Names of the losses of the whole model: ``layer_spec.auxiliary_loss_names``."""
    sequences: int
    """Sequences in the global batch."""
    tokens: Tensor | None = None
    """Number of unmasked tokens in the global batch, at least 1: a float64 scalar, set before the first forward."""
    counts: dict[str, Tensor] = field(default_factory=dict)
    """Number of terms of each ``"counted"`` loss, by name, and of unmasked ``"tokens"``: float64 scalars.

    Initially for the micro-batches of this rank; for the global batch before the first forward pass.
    """
    loss_scale: float | Tensor = 1.0
    """Factor on all gradients, against underflow in float16."""
    counting_layers: tuple[Sequence[int], int] = ((), 1)
    """``ModelConfig.counting_layers`` of the whole model: layers with experts."""
    values: dict[tuple[str, int, int], tuple[Tensor, Tensor | int, bool]] = field(default_factory=dict)
    """By name, layer and micro-batch: (value, denominator, whether it is partial).

    A layer recomputed in backward stores the same value again.
    """
    loads: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Loads of the experts, rows of ``expert_load``, by layer and micro-batch."""
    counts_by_micro_batch: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Arguments of ``counts_so_far``, by layer and micro-batch."""

    def of_micro_batch(self, micro: int) -> "MicroBatchAuxiliaryLosses":
        """Return the collector for the forward pass of a micro-batch."""
        return MicroBatchAuxiliaryLosses(self, micro)

    def denominator(self, name: str, per: Unit) -> Tensor | int:
        """Return the number of terms of the loss ``name`` in the global batch."""
        # Counts of the global batch, which is known before the first forward: dividing by the counts of a micro-batch
        # or a rank would make the loss depend on the layout.
        if per == "sequences":
            return self.sequences
        if per == "counted":
            return self.counts[name]
        assert self.tokens is not None, "set before the first forward pass"
        return self.tokens

    def totals(self, device: torch.device, *, owns_loss: bool) -> Tensor:
        """Return this rank's part of each loss, float64 ``[3 names]``, to be summed over all ranks for ``means``.

        For each name the sum of the values, the sum of their denominators, and the number of values: denominators are
        equal, and dividing after the sum over ranks keeps exact sums exact. ``owns_loss``: whether this rank counts the
        values that are equal on all tensor-parallel ranks.
        """
        total = torch.zeros(3, len(self.names), dtype=torch.float64, device=device)
        for (name, _, _), (value, denominator, partial) in self.values.items():
            if partial or owns_loss:
                index = self.names.index(name)
                # Sums and denominators travel separately: a rank may have no value, and a mean of means would be wrong.
                total[0, index] += value
                total[1, index] += denominator
                total[2, index] += 1.0
        return total.flatten()

    def means(self, totals: Sequence[float]) -> dict[str, float]:
        """Return each loss by name from the sums over all ranks of ``totals``."""
        count = len(self.names)
        sums, denominators, values = (totals[start : start + count] for start in (0, count, 2 * count))
        numbers = zip(self.names, sums, denominators, values, strict=True)
        return {name: value / (denominator / n) if n else 0.0 for name, value, denominator, n in numbers}

    def expert_load(self, device: torch.device) -> Tensor:
        """Return this rank's part of each layer's load, float64 ``[layers, num_experts + 1]``.

        A row has the number of tokens that chose each expert, then the number of dropped choices. The sum over all
        ranks is the load by the global batch.
        """
        layers, numbers = self.counting_layers
        total = torch.zeros(len(layers), numbers, dtype=torch.float64, device=device)
        for (layer_number, _), load in self.loads.items():
            total[layers.index(layer_number)] += load
        return total

    def store(
        self, name: str, layer_number: int, micro: int, value: Tensor, denominator: Tensor | int, *, partial: bool
    ) -> None:
        """Store ``value`` and its denominator for ``totals``."""
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
        # By key and not added up, because a recomputed layer stores its value twice. Detached, because the step
        # outlives the graph of a micro-batch.
        self.values[name, layer_number, micro] = value.detach(), denominator, partial


@dataclass(frozen=True)
class MicroBatchAuxiliaryLosses:
    """Collector of the ``AuxiliaryLosses`` of one micro-batch."""

    step: AuxiliaryLosses
    micro: int

    def add(
        self, hidden: Tensor, name: str, value: Tensor, layer_number: int, coefficient: float, per: Unit, partial: bool
    ) -> Tensor:
        """See ``SequenceContext.add_auxiliary_loss``."""
        denominator = self.step.denominator(name, per)
        self.step.store(name, layer_number, self.micro, value, denominator, partial=partial)
        # The gradient is attached to an activation instead of added to the loss: the loss is computed on the last
        # stage, which has no graph of this layer.
        return _AttachGradient.apply(hidden, value, coefficient * self.step.loss_scale / denominator)

    def add_load(self, layer_number: int, load: Tensor) -> None:
        """Store the load of a layer by this micro-batch on this rank, a row of ``AuxiliaryLosses.expert_load``."""
        self.step.loads[layer_number, self.micro] = load

    def counts_so_far(self, layer_number: int, counts: Tensor) -> Tensor:
        """Return ``counts`` plus the counts passed for earlier micro-batches."""
        stored = self.step.counts_by_micro_batch
        stored[layer_number, self.micro] = counts
        return torch.stack([stored[layer_number, micro] for micro in range(self.micro + 1)]).sum(0)


class _AttachGradient(torch.autograd.Function):
    """(hidden, loss) -> hidden; backward gives the loss the gradient ``factor``."""

    @staticmethod
    def forward(ctx, hidden, value, factor):
        # Independent of the gradient that arrives: the auxiliary loss is a term of the sum, with the derivative
        # ``factor``.
        # A number becomes a tensor on the device: a copy from the host would wait for all work of a GPU.
        ctx.gradient = factor.to(value.dtype) if isinstance(factor, Tensor) else torch.full_like(value, factor)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad):
        return grad, ctx.gradient, None
