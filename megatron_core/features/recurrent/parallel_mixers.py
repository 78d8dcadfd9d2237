"""Attention and a recurrence with the same input in one layer."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.joined import JoinedParts, added
from megatron_core.transformer.mlp import scaled


class ParallelMixers(nn.ModuleDict):
    """x -> sum over mixers of factor * mixer(x), ``[s, b, h]`` -> the same shape (``[s/tp, b, h]`` with sequence
    parallelism).

    ``mixers`` constructs them by name; their factors are ``parallel_mixer_multipliers``, in the same order. Each has
    its own memory in generation: keys and values, or states.
    Source: Zuo et al. 2025, Falcon-H1 (arXiv 2507.22448), section 2.
    """

    def __init__(
        self, context: LayerContext, layer_number: int, *, mixers: Mapping[str, Callable[..., nn.Module]]
    ) -> None:
        super().__init__({name: make(context, layer_number) for name, make in mixers.items()})
        self.factors = context.config.parallel_mixer_multipliers
        self.joined = JoinedParts.of(list(self.values()), context)

    def forward(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor | None]:
        """Return (sum of the outputs, sum of their biases or None)."""
        outputs = [
            scaled(mixer(hidden, context), factor) for mixer, factor in zip(self.values(), self.factors, strict=True)
        ]
        output, bias = added(outputs)
        return output if self.joined is None else self.joined.reduced(output), bias
